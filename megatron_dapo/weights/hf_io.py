"""Hugging Face checkpoints on disk: single tensors or slices of them read where they lie, shards written one at a time."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_folder import INDEX, SINGLE, read_json

SHARD_BYTES = 4 * 2**30
"""Size at which a shard is closed."""

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

Planned = tuple[str, torch.dtype, tuple[int, ...]]
"""A tensor that will be written: name, dtype, shape."""


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
        for entry in header.values():
            numbers = [*entry["shape"], *entry["data_offsets"]]
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError("a shape or a place is no number")
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
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OSError) as error:
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


def _weight_map(index: Path) -> dict[str, str]:
    """Where an index places every tensor."""
    content = read_json(index)
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise InputError(f"{index}: holds no weight_map from tensors to files; fetch it again")
    if outside := next((name for name in where.values() if Path(name).name != name), None):
        raise InputError(f"{index}: {outside!r} is no file of this folder; fetch it again")
    return where


class HfReader:
    """The tensors of a checkpoint. Only what is asked for is read, straight to where it is wanted; no file stays open or mapped.

    Raises:
        InputError: a shard is missing or not whole, the index names what is not there.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.where: dict[str, str] = {}
        self.headers: dict[str, dict[str, _Entry]] = {}
        index = self.folder / INDEX
        if (self.folder / SINGLE).is_file() or not index.is_file():  # transformers prefers the one file as well
            single = self.folder / SINGLE
            for path in [single] if single.is_file() else sorted(self.folder.glob("*.safetensors")):
                self.headers[path.name] = _read_header(path)
                if twice := self.headers[path.name].keys() & self.where.keys():
                    raise InputError(f"{path}: tensor {min(twice)} is in {self.where[min(twice)]} as well; keep one")
                self.where |= dict.fromkeys(self.headers[path.name], path.name)
            return
        self.where = _weight_map(index)
        for name in sorted(set(self.where.values())):
            if not (self.folder / name).is_file():
                raise InputError(f"{self.folder}: shard {name} is missing, which {index.name} names; fetch it again")
            self.headers[name] = _read_header(self.folder / name)
        for tensor, name in self.where.items():
            if tensor not in self.headers[name]:
                raise InputError(f"{self.folder / name}: tensor {tensor} is missing, which {index.name} places there")

    def check(self, expected: dict[str, tuple[int, ...]], tied: bool) -> None:
        """Compare names and shapes with those of the model: it has to have all tensors, and the file no other.

        Raises:
            InputError: a tensor is missing, of another shape or dtype, or none of the model's.
        """
        for name, shape in expected.items():
            self._entry(name, shape)
        harmless = {"lm_head.weight"} if tied else set()
        extra = sorted(
            n for n in self.where.keys() - expected.keys() - harmless if not n.endswith("rotary_emb.inv_freq")
        )
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise InputError(
                f"{self.folder}: tensor {extra[0]}{more}: the model of config.json has no such tensor; it would be lost"
            )
        if tied and "lm_head.weight" in self.where:
            self._check_tied(expected["model.embed_tokens.weight"])

    def _check_tied(self, shape: Sequence[int]) -> None:
        """A tied output layer that lies in the file too has to be the embedding: transformers would use it, SGLang not."""
        entries = [self._entry(name, shape) for name in ("model.embed_tokens.weight", "lm_head.weight")]
        files = [self.folder / self.where[name] for name in ("model.embed_tokens.weight", "lm_head.weight")]
        with open(files[0], "rb") as one, open(files[1], "rb") as other:
            one.seek(entries[0].begin)
            other.seek(entries[1].begin)
            rest = math.prod(shape) * entries[0].dtype.itemsize
            same = entries[0].dtype == entries[1].dtype
            while same and rest:
                size = min(rest, STAGED)
                same, rest = one.read(size) == other.read(size), rest - size
        if not same:
            raise InputError(
                f"{self.folder}: config.json ties lm_head.weight to the embedding, but the file has another one; "
                "set tie_word_embeddings to false, or remove the tensor"
            )

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
    """Writes ``planned`` tensors, in that order, into shards of at most SHARD_BYTES, named after ``part`` so that several ranks
    write at once. A tensor goes to the file as it comes, nothing is held: its header is known beforehand."""

    def __init__(self, folder: Path, part: str, planned: Iterable[Planned]) -> None:
        self.folder, self.part = folder, part
        self.shards = _shards(planned)
        self.waiting: list[Planned] = []
        self.file: PiecewiseFile | None = None
        self.total, self.number = 0, 0
        self.where: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, from any device."""
        if self.file is None:
            self._begin()
        assert self.file is not None
        given = (name, tensor.dtype, tuple(tensor.shape))
        assert self.waiting[0] == given, f"{given}, planned was {self.waiting[0]}"
        memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        self.file.write(memory)
        self.where[name] = self._name()
        self.total += memory.size
        self.waiting.pop(0)
        if not self.waiting:
            self.file.close()
            self.file, self.number = None, self.number + 1

    def _begin(self) -> None:
        """The next shard with its header."""
        self.waiting = self.shards[self.number]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, dtype, shape in self.waiting:
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)  # the data begins at a multiple of eight bytes
        self.file = PiecewiseFile(str(self.folder / self._name()), "wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def _name(self) -> str:
        return f"part-{self.part}-{self.number:05d}.safetensors"

    def flush(self) -> None:
        """All planned tensors have to be there."""
        assert self.number == len(self.shards), f"planned and not written: {self.shards[self.number][:3]}"


def _shards(planned: Iterable[Planned]) -> list[list[Planned]]:
    """Cut where a shard would become larger than SHARD_BYTES."""
    shards: list[list[Planned]] = []
    size = 0
    for tensor in planned:
        _, dtype, shape = tensor
        mine = math.prod(shape) * dtype.itemsize
        if not shards or size + mine > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += mine
    return shards


def write_index(folder: Path, where: dict[str, str], total: int) -> None:
    """Give the shards transformers' names; where there are several, write the index of which holds which tensor."""
    parts = sorted(set(where.values()))
    names = {part: f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number, part in enumerate(parts, 1)}
    if len(parts) == 1:
        names[parts[0]] = SINGLE
    for part, name in names.items():
        os.replace(folder / part, folder / name)
    if len(parts) > 1:
        weight_map = {tensor: names[part] for tensor, part in sorted(where.items())}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def whole_or_not_at_all(target: Path, owner: bool) -> Iterator[Path]:
    """A folder beside ``target`` that takes its place when the block ends well and is removed when it does not. All ranks
    write into it; ``owner``, one of them, makes, moves and removes it (the caller synchronises them)."""
    draft, old = (target.with_name(target.name + end) for end in (".unfinished", ".old"))
    if owner:
        _clear_up(target, draft, old)
        draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:
        if owner:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if owner:
        if target.exists():
            os.replace(target, old)
        os.replace(draft, target)
        _remove(old)


def _clear_up(target: Path, draft: Path, old: Path) -> None:
    """What an export that was killed has left: a folder moved aside comes back where its place is empty."""
    if old.exists() and not target.exists():
        os.replace(old, target)
        print(f"{target}: an export was cut off here; the folder before it is back", file=sys.stderr)
    for left in (draft, old):
        if left.exists():
            print(f"{left}: left behind by an export that was cut off; removed", file=sys.stderr)
            _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
