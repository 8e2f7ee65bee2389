"""What SGLang's checksums of its tensors must be, computed from the trainer's: the names and shards of its fused layers. Pure.

SGLang joins query, key and value into one tensor, gate and up into another, splits them over its tensor-parallel ranks, and
hashes what each rank holds: the first 8 bytes of SHA-256 over the raw bytes. (On GPUs its hash is another one, so there
servers can only be compared with each other.)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

import torch

VOCAB_MULTIPLE = 64
"""SGLang pads a vocabulary to this many rows, with zeros."""

JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""SGLang's fused layers and the Hugging Face layers they are made of, in order."""

SPLIT_BY_COLUMN = ("o_proj.weight", "down_proj.weight")
"""Weights whose input dimension SGLang's ranks share; of all others but norms it is the output dimension."""

_PART = re.compile(r"\.(" + "|".join(part for parts in JOINED.values() for part in parts) + r")\.(weight|bias)$")


def digest(tensor: torch.Tensor) -> str:
    """SGLang's checksum of one tensor on a CPU, 16 hexadecimal digits."""
    raw = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashlib.sha256(raw).digest()[:8].hex()


def checksums(tensors: Iterable[tuple[str, torch.Tensor]], tp_size: int) -> dict[str, list[str]]:
    """SGLang's name of every tensor -> its checksum on each tensor-parallel rank. Parts of a fused layer follow each other in
    ``tensors``, as the gather yields them. Experts, which SGLang stacks, are left out."""
    return {name: [digest(part) for part in parts] for name, parts in _server_tensors(tensors, tp_size)}


def _server_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], tp_size: int
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    held: list[list[torch.Tensor]] = []
    for name, tensor in tensors:
        if ".experts." in name:
            continue
        parts = _split(name, tensor, tp_size)
        found = _PART.search(name)
        if not found:
            yield name, parts
            continue
        fused = next(whole for whole, names in JOINED.items() if found[1] in names)
        held.append(parts)
        if len(held) == len(JOINED[fused]):
            joined = [torch.cat([parts[rank] for parts in held]) for rank in range(tp_size)]
            yield name[: found.start()] + f".{fused}.{found[2]}", joined
            held = []


def _split(name: str, tensor: torch.Tensor, tp_size: int) -> list[torch.Tensor]:
    """The part of every rank."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        rows = -(-tensor.size(0) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        padded = tensor.new_zeros(rows, tensor.size(1))
        padded[: tensor.size(0)] = tensor
        return list(padded.chunk(tp_size))
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return [tensor] * tp_size
    return list(tensor.chunk(tp_size, 1 if name.endswith(SPLIT_BY_COLUMN) else 0))
