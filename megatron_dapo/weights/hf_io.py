"""Hugging Face checkpoints on disk: single tensors or slices of them read where they lie, shards written one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.types import InputError
from megatron_dapo.weights.mapping import HfConfig, read_config

SHARD_BYTES = 4 * 2**30
"""Size at which a shard is closed."""

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files that an export takes over from the checkpoint it began with, where they exist."""


def is_hf_checkpoint(folder: str | None) -> bool:
    """True for a folder with a config.json and safetensors."""
    return folder is not None and Path(folder, "config.json").is_file() and any(Path(folder).glob("*.safetensors"))


def load_config(folder: str) -> HfConfig:
    """The model of ``folder``.

    Raises:
        InputError: no config.json there, or one that is not mapped.
    """
    path = Path(folder, "config.json")
    if not path.is_file():
        raise InputError(
            f"--hf-checkpoint {folder}: no config.json there; give the folder of a Hugging Face checkpoint"
        )
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON ({error.msg})") from None
    return read_config(raw, str(path))


class HfReader:
    """The tensors of a checkpoint. Files are opened when first needed and mapped, so only what is asked for is read.

    Raises:
        InputError: a shard is missing or not whole, the index names what is not there.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.files: dict[str, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self.where: dict[str, str] = json.loads(index.read_text())["weight_map"]
            for name in sorted(set(self.where.values())):
                if not (self.folder / name).is_file():
                    raise InputError(
                        f"{self.folder}: shard {name} is missing, which {index.name} names; fetch it again"
                    )
            held = {name: set(self._open(name).keys()) for name in set(self.where.values())}
            for tensor, name in self.where.items():
                if tensor not in held[name]:
                    raise InputError(
                        f"{self.folder / name}: tensor {tensor} is missing, which {index.name} places there"
                    )
        else:
            names = sorted(p.name for p in self.folder.glob("*.safetensors"))
            self.where = {tensor: name for name in names for tensor in self._open(name).keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        if name not in self.files:
            from safetensors import SafetensorError, safe_open

            try:
                self.files[name] = safe_open(self.folder / name, framework="pt")
            except SafetensorError as error:
                raise InputError(
                    f"{self.folder / name}: not a whole safetensors file ({error}); fetch it again"
                ) from None
        return self.files[name]

    def read(self, name: str, shape: Sequence[int], part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Tensor ``name``, which must have ``shape``, or the ``part`` of it.

        Raises:
            InputError: it is missing, of another shape, no floating-point tensor, or holds NaN or infinity.
        """
        if name not in self.where:
            raise InputError(f"{self.folder}: tensor {name} is missing")
        view = self._open(self.where[name]).get_slice(name)
        if list(view.get_shape()) != list(shape):
            raise InputError(f"{self.folder}: tensor {name} is {view.get_shape()}, config.json makes it {list(shape)}")
        everything = tuple(slice(0, n) for n in shape)
        whole = part is None or part == everything  # then no copy is made of what the file holds
        tensor: torch.Tensor = self._open(self.where[name]).get_tensor(name) if whole else view[part]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise InputError(f"{self.folder}: tensor {name} is {tensor.dtype}; give a checkpoint in bf16, fp16 or fp32")
        # A sum is NaN or infinite where any term is, and needs no memory; only then each entry is looked at.
        if not bool(tensor.sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all()):
            raise InputError(f"{self.folder}: tensor {name} holds NaN or infinity")
        return tensor


class HfWriter:
    """Writes tensors into shards of at most SHARD_BYTES, named after ``part`` so that several ranks write at once."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        self.waiting: dict[str, torch.Tensor] = {}
        self.bytes, self.total, self.number = 0, 0, 0
        self.where: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more tensor; a full shard is written and let go of."""
        assert name not in self.where and name not in self.waiting, f"{name} twice"
        size = tensor.numel() * tensor.element_size()
        if self.waiting and self.bytes + size > SHARD_BYTES:
            self.flush()
        self.waiting[name] = tensor
        self.bytes += size
        self.total += size

    def flush(self) -> None:
        """Write what is waiting."""
        if not self.waiting:
            return
        from safetensors.torch import save_file

        name = f"model-{self.part}-{self.number:05d}.safetensors"
        save_file(self.waiting, self.folder / name, metadata={"format": "pt"})
        self.where |= dict.fromkeys(self.waiting, name)
        self.waiting, self.bytes, self.number = {}, 0, self.number + 1


def write_index(folder: Path, where: dict[str, str], total: int) -> None:
    """The index that tells loaders which shard holds which tensor."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1) + "\n")


def copy_companions(source: str, target: Path, dtype: str) -> None:
    """config.json (with the dtype that is written), tokenizer and generation config, from the checkpoint of the start."""
    raw = json.loads(Path(source, "config.json").read_text())
    raw["dtype" if "dtype" in raw else "torch_dtype"] = dtype
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for name in COPIED:
        if Path(source, name).is_file():
            shutil.copy(Path(source, name), target / name)


@contextlib.contextmanager
def whole_or_not_at_all(target: Path, owner: bool) -> Iterator[Path]:
    """A folder beside ``target`` that takes its place when the block ends well and is removed when it does not. All ranks
    write into it; ``owner``, one of them, makes, moves and removes it (the caller synchronises them)."""
    draft = target.with_name(target.name + ".unfinished")
    if owner:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:
        if owner:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if owner:
        old = target.with_name(target.name + ".old")
        if target.exists():
            os.replace(target, old)
        os.replace(draft, target)
        shutil.rmtree(old, ignore_errors=True)
