"""FP8 weights for rollout servers: e4m3 with a scale for every block of 128 x 128, as DeepSeek publishes them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch

BLOCK = 128
"""Rows and columns that share a scale."""

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448: the largest number of e4m3."""

QUANTISED = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""Ends of the names of what is quantised: linear layers of attention and MLP; never embeddings, router, norms, biases."""


def server_flags() -> dict[str, str | None]:
    """Flags that make a server of a bf16 checkpoint compute with such weights; its own come with the first publication."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    return {"json-model-override-args": json.dumps({"quantization_config": config}), "load-format": "dummy"}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [n, k] -> e4m3 [n, k] and float32 scales [ceil(n / 128), ceil(k / 128)], weight ~ e4m3 * scale.

    A block's scale is its largest magnitude over 448, so nothing overflows; a block of zeros has scale 1.
    """
    n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = weight.new_zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32)
    padded[:n, :k] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    small = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return small.view(rows * BLOCK, columns * BLOCK)[:n, :k].contiguous(), scale


def dequantize(small: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 weight [n, k] that ``quantize`` stands for."""
    n, k = small.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return small.float() * wide


def quantized(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of Hugging Face tensors with the linear layers' weights in FP8, each followed by its ``weight_scale_inv``."""
    for name, tensor in tensors:
        if not name.endswith(QUANTISED):
            yield name, tensor
            continue
        small, scale = quantize(tensor)
        yield name, small
        yield f"{name}_scale_inv", scale
