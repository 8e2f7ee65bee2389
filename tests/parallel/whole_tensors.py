"""Whole parameters and gradients out of the shards that the ranks hold: an oracle for tests, slow and plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from tolerances import relative_bound

from megatron_dapo.weights.gather import local_parameters

REPLICA_TOLERANCE = relative_bound(4, passes=3)
"""Relative to the largest entry: copies on several ranks are the same up to this (reductions may differ in order)."""


def complete_gradients(trainer: Any) -> None:
    """After the distributed optimizer's reduce-scatter a rank holds a part of each gradient buffer: gather the rest."""
    for chunk in trainer.model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(size)[rank].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=buffer.data_parallel_group)


def whole(trainer: Any, read: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """``read`` of every parameter, whole, by Megatron's name with global layer and expert numbers; on rank 0, else {}."""
    pieces = []
    for name, p in local_parameters(trainer.model, tied=not trainer.args.untie_embeddings_and_output_weights):
        expert = ".experts." in name
        rank = mpu.get_expert_tensor_parallel_rank() if expert else mpu.get_tensor_model_parallel_rank()
        split = getattr(p, "partition_dim", -1) if getattr(p, "tensor_model_parallel", False) else -1
        pieces.append((name, split, rank, read(p).detach().clone()))
    everywhere: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pieces, everywhere)
    by_name: dict[str, tuple[int, dict[int, torch.Tensor]]] = {}
    for name, split, rank, piece in (p for part in everywhere or [] for p in part):
        rank = rank if split >= 0 else 0
        shards = by_name.setdefault(name, (split, {}))[1]
        if rank in shards:
            assert_same(name, shards[rank], piece)
        shards[rank] = piece
    return {name: _join(name, split, shards) for name, (split, shards) in sorted(by_name.items())}


def assert_same(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Copies of a parameter or gradient on several ranks agree."""
    bound = REPLICA_TOLERANCE * max(float(one.abs().max()), 1e-12)
    difference = float((one - other).abs().max())
    assert difference <= bound, (
        f"{name}: its copies differ by {difference:.3g}, largest entry {float(one.abs().max()):.3g}"
    )


def _join(name: str, split: int, shards: dict[int, torch.Tensor]) -> torch.Tensor:
    parts = [shards[rank] for rank in sorted(shards)]
    if split < 0 or len(parts) == 1:
        return parts[0]
    if "linear_fc1" in name:  # every rank has its part of the gate above its part of the value
        gates, values = zip(*(part.chunk(2, split) for part in parts), strict=True)
        return torch.cat([*gates, *values], split)
    return torch.cat(parts, split)
