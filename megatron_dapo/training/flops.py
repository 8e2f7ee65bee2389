"""How many floating-point operations the updates of a rollout step are: the numerator of ``perf/mfu``."""

from __future__ import annotations

from typing import Any

from megatron.training.training import num_floating_point_operations

from megatron_dapo import compat
from megatron_dapo.types import Trajectories


def update_flops(args: Any, rows: Trajectories) -> float:
    """Of the model, forward and backward, for every token of ``rows`` once, by Megatron's count: matrix products and causal
    attention within each sequence. Neither padding nor recomputation nor the pass for the old policy's log-probs is in it."""
    lengths = [len(tokens) for tokens in rows.tokens]
    squares = sum(length**2 for length in lengths)
    return float(num_floating_point_operations(args, len(lengths), squares, sum(lengths)))


def utilisation(args: Any, rows: Trajectories, seconds: float) -> float | None:
    """Share of the GPUs' dense bf16 peak that updates which took ``seconds`` are; None where there is none to compare with:
    on a CPU, on a GPU that is not in ``compat.PEAK_FLOPS``, in fp32."""
    peak = compat.peak_flops() if args.bf16 else None
    return update_flops(args, rows) / (seconds * args.world_size * peak) if peak else None
