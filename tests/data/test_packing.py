"""Packing: nothing lost, nothing twice, budgets kept, every rank as many micro-batches, and balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.data.packing import pack_sequences, padded_length, split_minibatches
from megatron_dapo.types import InputError


@given(
    st.lists(st.integers(1, 100), max_size=60),
    st.integers(1, 4),
    st.integers(100, 300),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
)
def test_every_sequence_is_in_one_microbatch_that_fits(lengths, dp, budget, multiple, micro_multiple):
    budget = padded_length(budget, multiple)
    plan = pack_sequences(np.array(lengths, dtype=np.int64), dp, budget, multiple, micro_multiple)
    assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(len(lengths)))
    assert len(plan) == dp and len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1 and len(plan[0]) % micro_multiple == 0
    for batch in (batch for rank in plan for batch in rank):
        assert sum(padded_length(lengths[i], multiple) for i in batch) <= budget
    if len(lengths) >= len(plan[0]) * dp:
        assert all(len(batch) for rank in plan for batch in rank), (
            "no micro-batch is empty while there is enough to fill all"
        )


def test_the_plan_is_the_same_every_time():
    lengths = np.random.default_rng(0).integers(1, 500, 200)
    plans = [pack_sequences(lengths, 4, 1000, 8) for _ in range(2)]
    assert all((a == b).all() for r, s in zip(*plans, strict=True) for a, b in zip(r, s, strict=True))


def test_a_sequence_above_the_budget_is_named():
    with pytest.raises(
        InputError, match="a sequence of 104 tokens does not fit a micro-batch of 100; raise --max-tokens-per-gpu"
    ):
        pack_sequences(np.array([5, 101]), 1, 100, 8)


def test_where_dealing_evenly_would_exceed_the_budget_by_a_token_there_is_one_more_microbatch():
    """Two bins would do for best fit; dealt to the lightest, one would hold 7 of 6 tokens."""
    (plan,) = pack_sequences(np.array([3, 3, 2, 2, 2]), 1, 6)
    assert sorted(sum([3, 3, 2, 2, 2][i] for i in batch) for batch in plan) == [3, 4, 5]


def test_fewer_sequences_than_ranks_leaves_empty_microbatches():
    plan = pack_sequences(np.array([5]), 4, 100)
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 0, 1]


@pytest.mark.parametrize("dp", [1, 8])
def test_a_dapo_like_rollout_packs_tightly_and_evenly(dp):
    """Mean about 4k, tail to 20k, 8,192 samples, 22,528 tokens per micro-batch."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(3000), 0.75, 8192), 64, 20480).astype(np.int64)
    plan = pack_sequences(lengths, dp, 22528, 16)
    loads = np.array([sum(int(lengths[batch].sum()) for batch in rank) for rank in plan])
    assert lengths.sum() / (dp * len(plan[0]) * 22528) >= 0.97
    assert loads.max() / loads.mean() - 1 <= 0.03


def test_ranks_have_the_same_attention_too():
    """A sequence of 20k costs six times what its tokens say; ranks balanced by tokens alone wait for one another."""
    span = 4000
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(3000), 0.75, 256), 64, 20480).astype(np.int64)
    cost = lengths * (1 + lengths / span)

    def imbalance(**options: float) -> float:
        loads = [
            sum(float(cost[batch].sum()) for batch in rank) for rank in pack_sequences(lengths, 4, 20480, **options)
        ]
        return max(loads) / (sum(loads) / len(loads)) - 1

    assert imbalance(attention_span=span) <= 0.03 < 0.1 < imbalance()


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 8), st.integers(0, 3))
def test_minibatches_are_whole_groups_and_lose_nothing(groups, size, steps, seed):
    labels = np.repeat(np.arange(groups)[::-1], size)
    parts = split_minibatches(labels, steps, seed)
    assert sorted(np.concatenate(parts)) == list(range(groups * size))
    assert len(parts) == min(steps, groups)
    counts = [len(set(labels[part])) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert all(len(part) == count * size for part, count in zip(parts, counts, strict=True)), "a group was torn apart"


def test_minibatches_are_shuffled_by_the_seed():
    labels = np.repeat(np.arange(16), 2)
    first, again, other = (split_minibatches(labels, 4, seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other
