"""Aggregation modes as weights: each must be its definition, whatever is masked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.aggregation import sequence_loss_weights
from megatron_dapo.config import LossOptions
from megatron_dapo.types import InputError

MODES = ("token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def weights(mode, tokens, groups=None, **options):
    labels = np.zeros(len(tokens), np.int64) if groups is None else np.array(groups)
    return sequence_loss_weights(np.array(tokens), labels, LossOptions(loss_agg_mode=mode, **options), 10)


def total(mode, losses, groups, **options):
    """The step's loss by the weights. ``losses``: the token losses of every response's unmasked tokens."""
    counts = [len(x) for x in losses]
    w = weights(mode, counts, groups, **options)
    return sum(wi * sum(x) for wi, x in zip(w, losses, strict=True)) / sum(counts)


def test_two_and_eight_tokens():
    """The example of verl#906 under each mode; one response a prompt, then both of one prompt."""
    losses = [[1.0] * 2, [3.0] * 8]
    assert total("token-mean", losses, [0, 1]) == pytest.approx(2.6)
    assert total("prompt-mean", losses, [0, 1]) == pytest.approx(2.0)
    assert total("prompt-mean", losses, [5, 5]) == pytest.approx(2.6)
    assert total("seq-mean-token-mean", losses, [0, 1]) == pytest.approx(2.0)
    assert total("seq-mean-token-sum-norm", losses, [0, 1]) == pytest.approx((2 / 10 + 24 / 10) / 2)
    assert total("seq-mean-token-sum-norm", losses, [0, 1], loss_norm_length=26) == pytest.approx(0.5)


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.floats(-5, 5, width=32), max_size=6)), min_size=1, max_size=10
).filter(lambda step: any(losses for _, losses in step))


@given(STEPS)
def test_each_mode_is_its_definition(step):
    groups, losses = [g for g, _ in step], [x for _, x in step]
    live = [x for x in losses if x]
    by_prompt = {g: [v for h, x in step if h == g for v in x] for g in set(groups)}
    expected = {
        "token-mean": np.mean(np.concatenate(live)),
        "prompt-mean": np.mean([np.mean(x) for x in by_prompt.values() if x]),
        "seq-mean-token-mean": np.mean([np.mean(x) for x in live]),
        "seq-mean-token-sum-norm": np.mean([np.sum(x) / 10 for x in live]),
    }
    for mode, value in expected.items():
        assert total(mode, losses, groups) == pytest.approx(value, abs=1e-9), mode


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_response_changes_nothing(mode):
    """On either side of the fraction: 1 truncated of 4 (trl#6369), alone in its group and with others."""
    without = weights(mode, [2, 5, 3], [0, 0, 1])
    beside = weights(mode, [2, 0, 5, 3], [0, 0, 0, 1])
    alone = weights(mode, [2, 5, 3, 0], [0, 0, 1, 2])
    assert beside.tolist() == [without[0], 0.0, without[1], without[2]]
    assert alone.tolist() == [*without, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_all_masked_is_all_zeros(mode):
    assert weights(mode, [0, 0]).tolist() == [0.0, 0.0]
    assert weights(mode, []).tolist() == []


@pytest.mark.parametrize("length", [0, -3])
def test_the_constant_must_be_a_length(length):
    with pytest.raises(InputError, match=f"--loss-norm-length {length}"):
        weights("seq-mean-token-sum-norm", [1], loss_norm_length=length)
