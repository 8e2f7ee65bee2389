"""The few exchanges between ranks that the loop needs: objects from rank 0, metrics to everybody, sums that differentiate;
and a process group with somebody else's processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_dapo.types import InputError, Sums, merge_sums


def broadcast_object[T](value: T | None) -> T:
    """Rank 0's ``value``, on every rank (pickled; numpy columns travel as bytes)."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    received: T = box[0]
    return received


def from_rank0[T](ask: Callable[[], T]) -> T:
    """What ``ask`` returns on rank 0, on every rank; it is called there alone. Collective.

    Raises:
        InputError: what rank 0 refused, on every rank, so that none waits for one that has ended.
    """
    answer, refusal = None, None
    if dist.get_rank() == 0:
        try:
            answer = ask()
        except InputError as raised:
            refusal = raised
    answer, refusal = broadcast_object((answer, refusal))
    if refusal is not None:
        raise refusal
    return answer  # type: ignore[return-value]


def on_rank0[T](make: Callable[[], T]) -> T | None:
    """What ``make`` returns on rank 0, None elsewhere: nothing travels but a refusal. Collective.

    Raises:
        InputError: as ``from_rank0``.
    """
    made: list[T] = []
    from_rank0(lambda: made.append(make()))
    return made[0] if made else None


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
    summed: torch.Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


def share_dicts[K, V](local: dict[K, V]) -> dict[K, V]:
    """All ranks' entries, on every rank; where several have a key, the highest rank's value."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return {key: value for part in parts for key, value in part.items()}


def backend_of_this_machine() -> str:
    """NCCL where tensors live on GPUs, gloo elsewhere."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join_foreign_group(address: str, port: int, world_size: int, name: str, timeout_s: float) -> dist.ProcessGroup:
    """Become rank 0 of a new group whose other members are not of this program: SGLang's ranks.

    They build their side from the TCP store that is opened at ``address:port``, with keys that begin with ``name``, beside
    the default group they have. torch's public initialiser would replace our default group, so both sides use its inner
    parts. Returns when all have joined.
    """
    _close_abandoned()
    timeout = timedelta(seconds=timeout_s)
    # A store of our own: torchrun's is another's.
    store = dist.TCPStore(address, port, world_size, is_master=True, timeout=timeout)  # type: ignore[attr-defined]
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend_of_this_machine()),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    joined: dist.ProcessGroup = group
    return joined


def begin_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start sending ``tensor`` from rank 0 of ``group`` and return at once."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([tensor], options)


def leave_foreign_group(group: dist.ProcessGroup) -> None:
    """Close this side of a group in which nothing is under way."""
    dist.destroy_process_group(group)


def abandon_foreign_group(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Give up a group whose broadcast ``work`` some member never joined. NCCL's is cut. gloo's cannot be: to close it waits,
    with the interpreter's lock held, until the broadcast's own time is over, so it is kept until then."""
    if torch.cuda.is_available():
        group.abort()
        dist.destroy_process_group(group)
    else:
        _abandoned.append((group, work))


_abandoned: list[tuple[dist.ProcessGroup, dist.Work]] = []


def _close_abandoned() -> None:
    for group, work in _abandoned[:]:
        if work.is_completed():
            _abandoned.remove((group, work))
            dist.destroy_process_group(group)
