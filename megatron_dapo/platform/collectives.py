"""The few exchanges between ranks that the loop needs: objects from rank 0, metrics to everybody, sums that differentiate."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.types import Sums, merge_sums


def broadcast_object[T](value: T | None) -> T:
    """Rank 0's ``value``, on every rank (pickled; numpy columns travel as bytes)."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    received: T = box[0]
    return received


def gather_to_rank0[T](value: T) -> list[T]:
    """Every rank's ``value`` in rank order on rank 0; an empty list elsewhere."""
    box: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, box, dst=0)
    return box or []


def any_rank(flag: bool) -> bool:
    """True on every rank where ``flag`` is true on any."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def merge_over_ranks(local: Sums) -> Sums:
    """Metrics of all ranks merged, the same on every rank. A rank whose numbers are copies of another's passes {}."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return merge_sums(*parts)


class _SumOverRanks(torch.autograd.Function):
    """y = sum over ranks of x; a gradient that arrives on one rank belongs to every rank's x, so it is summed too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_over_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Differentiable all-reduce for losses that are summed over ``group`` afterwards (sequence sums under context parallel)."""
    summed: torch.Tensor = _SumOverRanks.apply(x, group)
    return summed
