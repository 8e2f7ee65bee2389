"""Tensors packed into byte-bounded buckets, one flat row of bytes each: what one broadcast carries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bucket:
    """``flat`` uint8 [bytes] holds the tensors back to back, wider dtypes first, so that every one begins at a multiple of
    its item size."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor

    @classmethod
    def of(cls, tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
        """Pack ``tensors`` (at least one)."""
        ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())
        return cls(
            names=[name for name, _ in ordered],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            shapes=[list(tensor.shape) for _, tensor in ordered],
            flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in ordered]),
        )


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[Bucket]:
    """Pack a stream in order; a bucket exceeds ``most_bytes`` only where one tensor alone does."""
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > most_bytes:
            yield Bucket.of(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield Bucket.of(waiting)
