"""From trajectories to the packed micro-batches of this rank: balanced over data parallel, sliced for context parallel.

Every rank holds the whole optimizer step's columns (they are small beside the activations) and computes the same plan,
so nothing about the plan travels. Logits at position t predict token t+1: a response of R tokens after a prompt of P is
predicted at positions P-1 .. P+R-2 of its sequence, and only those positions enter a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dapo.algorithm.aggregation import sequence_loss_weights
from megatron_dapo.compat import device
from megatron_dapo.compat.portable_layers import zigzag_positions
from megatron_dapo.config import Options
from megatron_dapo.data.packing import pack_sequences, padded_length
from megatron_dapo.types import IntArray, Trajectories


@dataclass
class Microbatch:
    """One packed row of this rank: t tokens here (padding included), of which T predict a response token.

    ``tokens``, ``positions`` [1, t]; ``predicts`` [T] places in the row; the rest [T]: the id predicted, the loss columns,
    and ``sequence`` 0 .. ``num_sequences``-1. The trainer fills ``old_logprobs`` and ``reference_logprobs`` before the updates.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    packed: PackedSeqParams
    predicts: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    rollout_logprobs: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None


@dataclass
class Minibatch:
    """One optimizer step: this rank's micro-batches, and counts of the whole step over all ranks; ``num_tokens`` are those
    that the model sees, prompts and padding included."""

    microbatches: list[Microbatch]
    num_samples: int
    num_loss_tokens: int
    num_tokens: int

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self.microbatches)


@dataclass(frozen=True)
class Layout:
    """What packing needs to know of the ranks: sizes and this rank's place."""

    dp_size: int
    dp_rank: int
    cp_size: int
    cp_rank: int
    multiple: int
    micro_multiple: int = 1
    attention_span: float = math.inf

    @classmethod
    def of_this_rank(cls, multiple: int, args: Any) -> Layout:
        """Read the ranks from Megatron's parallel state, and what attention costs from the model's shape."""
        return cls(
            dp_size=mpu.get_data_parallel_world_size(),
            dp_rank=mpu.get_data_parallel_rank(),
            cp_size=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            multiple=multiple,
            micro_multiple=mpu.get_pipeline_model_parallel_world_size()
            if args.virtual_pipeline_model_parallel_size
            else 1,
            attention_span=attention_span(args),
        )


def attention_span(args: Any) -> float:
    """The sequence length at which causal attention costs as many FLOPs as all matrix products of a layer together.

    Per token and layer: 2 P for P weights in use; 2 A L for queries times keys and weights times values over L / 2 keys on
    average, A being heads times head size.
    """
    attention = args.num_attention_heads * args.kv_channels
    keys = (args.num_query_groups if args.group_query_attention else args.num_attention_heads) * args.kv_channels
    ffn = args.moe_ffn_hidden_size * args.moe_router_topk if args.num_experts else args.ffn_hidden_size
    weights = args.hidden_size * (2 * attention + 2 * keys + (3 if args.swiglu else 2) * ffn)
    return float(weights / attention)


def build_minibatch(rows: Trajectories, options: Options, layout: Layout) -> Minibatch:
    """Pack the samples of one optimizer step and build this rank's micro-batches.

    Raises:
        InputError: a sequence is longer than the token budget of a micro-batch.
    """
    loss_tokens = np.array([int(m.sum()) for m in rows.loss_mask], dtype=np.int64)
    weights = sequence_loss_weights(loss_tokens, rows.group, options.loss, options.rollout.rollout_max_response_len)
    lengths = np.array([len(t) for t in rows.tokens], dtype=np.int64)
    budget = options.token_budget(layout.cp_size, layout.multiple)
    plan = pack_sequences(
        lengths, layout.dp_size, budget, layout.multiple, layout.micro_multiple, layout.attention_span
    )
    padded = [padded_length(int(n), layout.multiple) for n in lengths]
    return Minibatch(
        microbatches=[_microbatch(rows, index, weights, layout) for index in plan[layout.dp_rank]],
        num_samples=len(rows),
        num_loss_tokens=int(loss_tokens.sum()),
        num_tokens=sum(padded) + layout.multiple * sum(len(index) == 0 for rank in plan for index in rank),
    )


def _microbatch(rows: Trajectories, index: IntArray, weights: np.ndarray, layout: Layout) -> Microbatch:
    if len(index) == 0:  # fewer sequences than ranks: this one still joins every collective, with nothing to learn from
        return _assemble([np.zeros(1, np.int64)], [_no_columns()], layout)
    return _assemble([rows.tokens[i] for i in index], [_columns(rows, i, weights[i]) for i in index], layout)


def _columns(rows: Trajectories, i: int, weight: float) -> dict[str, np.ndarray]:
    prompt, length = int(rows.prompt_lengths[i]), len(rows.tokens[i])
    response = length - prompt
    return {
        "predicts": np.arange(prompt - 1, length - 1),
        "targets": rows.tokens[i][prompt:],
        "mask": rows.loss_mask[i],
        "advantages": np.full(response, rows.advantages[i], np.float32),
        "weights": np.full(response, weight, np.float32),
        "rollout_logprobs": rows.rollout_logprobs[i].astype(np.float32),
    }


def _no_columns() -> dict[str, np.ndarray]:
    none, flag, real = np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.float32)
    return {
        "predicts": none, "targets": none, "mask": flag,
        "advantages": real, "weights": real, "rollout_logprobs": real,
    }  # fmt: skip


def _assemble(sequences: list[IntArray], columns: list[dict[str, np.ndarray]], layout: Layout) -> Microbatch:
    """Pad, slice for this context-parallel rank and join the sequences of one micro-batch."""
    padded = [padded_length(len(s), layout.multiple) for s in sequences]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "positions", "sequence", *columns[0])}
    start = 0
    for number, (ids, length, column) in enumerate(zip(sequences, padded, columns, strict=True)):
        mine = _positions_here(length, layout)
        parts["tokens"].append(np.pad(ids, (0, length - len(ids)))[mine])
        parts["positions"].append(mine)
        place = np.full(length, -1)
        place[mine] = np.arange(len(mine)) + start
        here = place[column["predicts"]] >= 0
        for name, values in column.items():
            parts[name].append(place[values[here]] if name == "predicts" else values[here])
        parts["sequence"].append(np.full(int(here.sum()), number))
        start += len(mine)
    joined = {name: torch.from_numpy(np.concatenate(values)).to(device()) for name, values in parts.items()}
    return Microbatch(
        tokens=joined.pop("tokens")[None],
        positions=joined.pop("positions")[None],
        packed=_packed_params(padded),
        num_sequences=len(sequences),
        **joined,
    )


def _positions_here(length: int, layout: Layout) -> IntArray:
    if layout.cp_size == 1:
        return np.arange(length)
    positions: IntArray = zigzag_positions(length, layout.cp_size, layout.cp_rank).numpy()
    return positions


def _packed_params(padded: list[int]) -> PackedSeqParams:
    """Boundaries in global (not per-rank) tokens: Megatron's rope and attention divide by the context-parallel size."""
    bounds = torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32, device=device())
    longest = max(padded)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
