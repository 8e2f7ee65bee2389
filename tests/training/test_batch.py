"""Micro-batches: every column zigzag-sliced alike, nothing lost on any rank, prompts never in a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import Options
from megatron_dapo.training.batch import Layout, Microbatch, attention_span, build_minibatch
from megatron_dapo.types import Trajectories


def rows_of(shapes: list[tuple[int, int]]) -> Trajectories:
    """Samples of (prompt, response) tokens; every token, advantage and log-prob is different, so that none can stand in
    for another."""
    total, tokens, logprobs, mask = 1, [], [], []
    for prompt, response in shapes:
        tokens.append(np.arange(total, total + prompt + response))
        logprobs.append(-np.arange(total, total + response, dtype=np.float32))
        mask.append(np.arange(response) % 3 != 1)
        total += prompt + response
    n = len(shapes)
    return Trajectories(
        tokens=tokens,
        prompt_lengths=np.array([p for p, _ in shapes]),
        rollout_logprobs=logprobs,
        loss_mask=mask,
        advantages=np.arange(1.0, n + 1),
        rewards=np.zeros(n),
        acc=np.zeros(n),
        group=np.arange(n),
        weight_version=np.zeros(n, np.int64),
    )


def minibatches(rows: Trajectories, cp: int, dp: int, tp: int, budget: int) -> dict[tuple[int, int], list[Microbatch]]:
    """By (data-parallel, context-parallel) rank."""
    longest = int(rows.response_lengths.max()) + int(rows.prompt_lengths.max())
    options = Options.from_args(
        rollout_max_prompt_len=1, rollout_max_response_len=longest, max_tokens_per_gpu=max(budget, longest + 64)
    )
    multiple = (2 * cp if cp > 1 else 1) * tp
    layouts = {(d, c): Layout(dp, d, cp, c, multiple) for d in range(dp) for c in range(cp)}
    return {place: build_minibatch(rows, options, layout).microbatches for place, layout in layouts.items()}


def triples(rows: Trajectories) -> list[tuple[Any, ...]]:
    """(token that predicts, token predicted, in the loss, advantage, log-prob) of every response token."""
    found = []
    for i, (ids, prompt) in enumerate(zip(rows.tokens, rows.prompt_lengths, strict=True)):
        for t in range(len(ids) - prompt):
            at = prompt + t
            columns = (bool(rows.loss_mask[i][t]), float(rows.advantages[i]), float(rows.rollout_logprobs[i][t]))
            found.append((int(ids[at - 1]), int(ids[at]), *columns))
    return sorted(found)


def read_back(batches: dict[tuple[int, int], list[Microbatch]]) -> list[tuple[Any, ...]]:
    found = []
    for micro in (micro for part in batches.values() for micro in part):
        predictors = micro.tokens[0, micro.predicts]
        columns = (predictors, micro.targets, micro.mask, micro.advantages, micro.rollout_logprobs)
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    return sorted(found)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
)
def test_every_response_token_is_on_one_rank_with_its_own_columns(shapes, cp, dp, tp):
    rows = rows_of(shapes)
    assert read_back(minibatches(rows, cp, dp, tp, budget=64)) == triples(rows)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_every_length_up_to_a_few_chunks_makes_the_round_trip(cp):
    for length in range(2, 4 * cp + 2):
        for prompt in {1, length - 1}:
            rows = rows_of([(prompt, length - prompt)])
            assert read_back(minibatches(rows, cp, 1, 1, budget=64)) == triples(rows), (length, prompt)


@pytest.mark.parametrize("cp", [2, 4])
def test_the_ranks_together_hold_each_sequence_once_and_equally_much(cp):
    rows = rows_of([(9, 3), (1, 1), (2, 14)])
    batches = minibatches(rows, cp, 1, 1, budget=64)
    rank_rows = [part[0] for part in batches.values()]
    assert len({micro.tokens.shape[1] for micro in rank_rows}) == 1
    held = sorted(token for micro in rank_rows for token in micro.tokens[0].tolist() if token)
    assert held == sorted(int(t) for ids in rows.tokens for t in ids)
    bounds = rank_rows[0].packed.cu_seqlens_q.tolist()
    assert bounds[-1] == cp * rank_rows[0].tokens.shape[1] and all(b % (2 * cp) == 0 for b in bounds)


def test_a_rank_without_a_response_token_still_has_its_micro_batch():
    """The one response token of a long prompt is predicted on one of four ranks."""
    batches = minibatches(rows_of([(31, 1)]), cp=4, dp=1, tp=1, budget=64)
    assert sorted(len(part[0].targets) for part in batches.values()) == [0, 0, 0, 1]
    assert all(part[0].tokens.shape == (1, 8) for part in batches.values())


def test_positions_are_those_of_the_sequence():
    (micro,) = minibatches(rows_of([(3, 2), (2, 2)]), cp=1, dp=1, tp=1, budget=64)[0, 0]
    ends = micro.packed.cu_seqlens_q.tolist()
    assert micro.positions[0].tolist() == [p for a, b in zip(ends, ends[1:], strict=False) for p in range(b - a)]


def test_under_context_parallelism_a_rank_has_the_positions_of_its_two_pieces():
    batches = minibatches(rows_of([(5, 3), (2, 2)]), cp=2, dp=1, tp=1, budget=64)
    assert batches[0, 0][0].positions[0].tolist() == [0, 1, 6, 7, 0, 3]
    assert batches[0, 1][0].positions[0].tolist() == [2, 3, 4, 5, 1, 2]


def test_every_response_token_knows_its_sequence():
    """The number is what sequence ratios are meant over."""
    (micro,) = minibatches(rows_of([(3, 2), (2, 4), (1, 1)]), cp=1, dp=1, tp=1, budget=64)[0, 0]
    assert micro.sequence.tolist() == [0, 0, 1, 1, 1, 1, 2] and micro.num_sequences == 3


def test_the_span_of_attention_in_qwen_7b():
    """233M weights a layer in use, 3,584 attention channels: attention costs as much as all else at 65k tokens."""
    shape = SimpleNamespace(
        hidden_size=3584, num_attention_heads=28, kv_channels=128, group_query_attention=True, num_query_groups=4,
        ffn_hidden_size=18944, num_experts=None, swiglu=True,
    )  # fmt: skip
    weights = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    assert attention_span(shape) == pytest.approx(weights / 3584) == 65_024
    assert torch.tensor(weights).item() == 233_046_016
