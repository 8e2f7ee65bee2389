"""Tensors packed into byte-bounded buckets, one flat row of bytes each: what one broadcast carries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Bucket:
    """``flat`` uint8 [bytes] holds the tensors back to back, wider dtypes first, so that every one begins at a multiple of
    its item size. No bucket comes after the ``last``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor
    last: bool

    @classmethod
    def of(cls, tensors: Named, room: torch.Tensor, last: bool) -> Bucket:
        """Pack ``tensors`` into the beginning of ``room`` (uint8, large enough)."""
        ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())
        offset = 0
        for _, tensor in ordered:
            room[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += tensor.nbytes
        return cls(
            names=[name for name, _ in ordered],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            shapes=[list(tensor.shape) for _, tensor in ordered],
            flat=room[:offset],
            last=last,
        )


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[Bucket]:
    """Pack a stream in order; a bucket exceeds ``most_bytes`` only where one tensor alone does.

    Two buffers take turns, for fresh memory costs several times what copying does: a bucket's ``flat`` holds until the
    next but one is asked for.
    """
    rooms: list[torch.Tensor | None] = [None, None]
    for number, (group, last) in enumerate(_with_last(_groups(tensors, most_bytes))):
        size, device = sum(tensor.nbytes for _, tensor in group), group[0][1].device
        room = rooms[number % 2]
        if room is None or room.numel() < size:
            room = torch.empty(size if last else max(size, most_bytes), dtype=torch.uint8, device=device)
            rooms[number % 2] = room
        bucket = Bucket.of(group, room, last)
        del group  # gathered tensors go before the next ones come
        yield bucket


def _groups(tensors: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[Named]:
    """What goes into one bucket each."""
    waiting: Named = []
    size = 0
    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > most_bytes:
            yield waiting
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield waiting


def _with_last[T](items: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Every item, and whether it is the last."""
    held: list[T] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True
