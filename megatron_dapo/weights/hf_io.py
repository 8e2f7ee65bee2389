"""Hugging Face checkpoints on disk: single tensors or slices of them read where they lie, shards written one at a time."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_dapo.types import InputError
from megatron_dapo.weights.mapping import HfConfig, read_config

SHARD_BYTES = 4 * 2**30
"""Size at which a shard is closed."""

HEADER_ROOM = 2**16
"""Bytes that a shard keeps in front of its data for the header, which spaces fill up: enough for some 500 tensors."""

CHECKED = 2**19
"""Bytes read at once: small enough for the check that follows to find them in the cache."""

STAGED = 2**23
"""Bytes held on the way to where they do not fit as they are."""

Memory = npt.NDArray[np.uint8]

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The dtypes of safetensors files."""

NAMES = {dtype: name for name, dtype in TYPES.items()}

BITS = {
    torch.bfloat16: (np.int16, np.uint16, 0x7F80), torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000), torch.float64: (np.int64, np.uint64, 0x7FF << 52),
}  # fmt: skip
"""Integers as wide as a floating-point number, signed and not, and infinity's bits."""

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


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file: its bytes begin at ``begin``; a row is one index of the first dimension."""

    dtype: torch.dtype
    shape: list[int]
    begin: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of a safetensors file: eight bytes that say how long the header is, the header (JSON), the data."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size - 8:
                raise ValueError("the header is cut off")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes, the header speaks of {8 + length + end}")
        for entry in header.values():
            first, last = entry["data_offsets"]
            if last - first != math.prod(entry["shape"]) * TYPES[entry["dtype"]].itemsize:
                raise ValueError("a tensor's shape contradicts its place")
        return {
            name: _Entry(TYPES[entry["dtype"]], entry["shape"], 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"unknown dtype or field {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path}: not a whole safetensors file ({reason}); fetch it again") from None


def _rows_and_columns(shape: Sequence[int], part: tuple[slice, ...] | None) -> tuple[slice, slice, bool]:
    """A part as a range of rows and one of columns; True where it has its rows whole."""
    part = part or tuple(slice(0, n) for n in shape)
    assert len(shape) <= 2, f"{list(shape)}: tensors of at most two dimensions"
    columns = part[1] if len(part) == 2 else slice(0, 1)
    return part[0], columns, len(part) == 1 or columns == slice(0, shape[1])


def _memory(place: torch.Tensor) -> list[Memory] | None:
    """The memory of a tensor on the CPU as runs of bytes: one, or one an index of the first dimension; None where it is
    scattered further."""
    parts = [place] if place.is_contiguous() else list(place)
    if not all(part.is_contiguous() for part in parts):
        return None
    return [part.detach().view(-1).view(torch.uint8).numpy() for part in parts]


def _all_finite(piece: Memory, dtype: torch.dtype) -> bool:
    """True where no entry is NaN or infinite, told from the bits: with all ones in its exponent a number is the largest of
    the signed integers, or, with a minus, of the unsigned ones. Two reductions without memory of their own; a sum in floating
    point takes ten times as long."""
    signed, unsigned, exponent = BITS[dtype]
    positive, negative = piece.view(signed), piece.view(unsigned)
    return bool(positive.max() < exponent) and bool(negative.max() < exponent + (1 << (8 * dtype.itemsize - 1)))


class PiecewiseFile(io.FileIO):
    """An unbuffered file that writes a MiB at a time: for the kernel up to three times as fast as tensors at one go."""

    def write(self, data: Any) -> int:
        """All of ``data``; how many bytes that is."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            rest = rest[super().write(rest[: 2**20]) :]
        return size


class HfReader:
    """The tensors of a checkpoint. Only what is asked for is read, straight to where it is wanted; no file stays open or mapped.

    Raises:
        InputError: a shard is missing or not whole, the index names what is not there.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.where: dict[str, str] = {}
        self.headers: dict[str, dict[str, _Entry]] = {}
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            for path in sorted(self.folder.glob("*.safetensors")):
                self.headers[path.name] = _read_header(path)
                self.where |= dict.fromkeys(self.headers[path.name], path.name)
            return
        self.where = json.loads(index.read_text())["weight_map"]
        for name in sorted(set(self.where.values())):
            if not (self.folder / name).is_file():
                raise InputError(f"{self.folder}: shard {name} is missing, which {index.name} names; fetch it again")
            self.headers[name] = _read_header(self.folder / name)
        for tensor, name in self.where.items():
            if tensor not in self.headers[name]:
                raise InputError(f"{self.folder / name}: tensor {tensor} is missing, which {index.name} places there")

    def read_into(
        self, place: torch.Tensor, name: str, shape: Sequence[int], part: tuple[slice, ...] | None = None
    ) -> None:
        """Tensor ``name``, which must have ``shape``, or the ``part`` of it, into ``place``, a tensor of as many entries.

        Raises:
            InputError: it is missing, of another shape, no floating-point tensor, or holds NaN or infinity.
        """
        entry = self._entry(name, shape)
        rows, columns, whole_rows = _rows_and_columns(shape, part)
        blocks = _memory(place) if whole_rows and place.dtype == entry.dtype and place.is_cpu else None
        if blocks is not None:
            assert sum(block.size for block in blocks) == (rows.stop - rows.start) * entry.row_bytes, name
            self._pull(name, entry, rows.start, blocks)
            return
        # Another dtype, another device or a slice of every row: through memory of our own, a few rows at a time.
        target = (
            place
            if whole_rows and place.is_contiguous()
            else torch.empty_like(place, memory_format=torch.contiguous_format)
        )
        flat = target.view(rows.stop - rows.start, -1)
        step = max(1, STAGED // entry.row_bytes)
        for begin in range(rows.start, rows.stop, step):
            end = min(begin + step, rows.stop)
            stage = np.empty((end - begin) * entry.row_bytes, np.uint8)
            self._pull(name, entry, begin, [stage])
            staged = torch.from_numpy(stage).view(entry.dtype).view(end - begin, -1)[:, columns]
            flat[begin - rows.start : end - rows.start].copy_(staged)
        if target is not place:
            place.copy_(target)

    def _entry(self, name: str, shape: Sequence[int]) -> _Entry:
        if name not in self.where:
            raise InputError(f"{self.folder}: tensor {name} is missing")
        entry = self.headers[self.where[name]][name]
        if entry.shape != list(shape):
            raise InputError(f"{self.folder}: tensor {name} is {entry.shape}, config.json makes it {list(shape)}")
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise InputError(f"{self.folder}: tensor {name} is {entry.dtype}; give a checkpoint in bf16, fp16 or fp32")
        return entry

    def _pull(self, name: str, entry: _Entry, row: int, blocks: list[Memory]) -> None:
        """Bytes of the file from ``row`` on into ``blocks``; each piece is checked while the processor's cache has it."""
        offset = entry.begin + row * entry.row_bytes
        with open(self.folder / self.where[name], "rb", buffering=0) as file:
            file.seek(offset)
            for block in blocks:
                for at in range(0, block.size, CHECKED):
                    piece = block[at : at + CHECKED]
                    if file.readinto(memoryview(piece)) != piece.size:
                        raise InputError(f"{self.folder / self.where[name]}: changed while it was read")
                    if not _all_finite(piece, entry.dtype):
                        raise InputError(f"{self.folder}: tensor {name} holds NaN or infinity")


class HfWriter:
    """Writes tensors into shards of at most SHARD_BYTES, named after ``part`` so that several ranks write at once.

    A tensor goes to the file as it comes, nothing is held: a shard begins with room for its header, which is written last.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        self.file: PiecewiseFile | None = None
        self.header: dict[str, Any] = {}
        self.bytes, self.header_bytes, self.total, self.number = 0, 0, 0, 0
        self.where: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more tensor, from any device; a full shard is closed."""
        assert name not in self.where, f"{name} twice"
        memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [2**60, 2**60]}
        room = len(json.dumps({name: entry}))  # offsets have fewer digits
        if self.bytes + memory.size > SHARD_BYTES or self.header_bytes + room > HEADER_ROOM:
            self.flush()
        if self.file is None:
            self.file = PiecewiseFile(str(self.folder / self._name()), "wb")
            self.file.seek(HEADER_ROOM)
            self.header, self.bytes, self.header_bytes = {"__metadata__": {"format": "pt"}}, 0, 60
        self.file.write(memory)
        self.header[name] = entry | {"data_offsets": [self.bytes, self.bytes + memory.size]}
        self.where[name] = self._name()
        self.header_bytes += room
        self.bytes += memory.size
        self.total += memory.size

    def _name(self) -> str:
        return f"model-{self.part}-{self.number:05d}.safetensors"

    def flush(self) -> None:
        """Close the shard that is being written."""
        if self.file is None:
            return
        text = json.dumps(self.header, separators=(",", ":")).encode().ljust(HEADER_ROOM - 8)
        self.file.seek(0)
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.close()
        self.file, self.number = None, self.number + 1


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
