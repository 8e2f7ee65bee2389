"""Soft overlong punishment (paper equation 13) and overlong filtering."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.shaping import overlong_filter, shape_rewards, soft_overlong_punishment
from megatron_dapo.config import RewardOptions

GOLDEN = {
    0: 0.0,
    16383: 0.0,
    16384: 0.0,
    16385: -0.000244140625,
    17408: -0.25,
    18432: -0.5,
    20480: -1.0,
    20481: -1.0,
    40000: -1.0,
}


def test_the_papers_setting():
    lengths = np.array(list(GOLDEN))
    assert soft_overlong_punishment(lengths, 20480, 4096, 1.0).tolist() == list(GOLDEN.values())
    assert soft_overlong_punishment(lengths, 20480, 4096, 0.5).tolist() == [x / 2 for x in GOLDEN.values()]


def test_no_buffer_punishes_nothing():
    assert soft_overlong_punishment(np.array([1, 20480, 30000]), 20480, 0, 1.0).tolist() == [0.0, 0.0, 0.0]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.integers(1, 200),
    st.integers(0, 200),
    st.floats(0, 5),
)
def test_within_bounds_and_never_rising_with_length(lengths, cap, buffer, factor):
    buffer = min(buffer, cap)
    punished = soft_overlong_punishment(np.sort(lengths), cap, buffer, factor)
    assert punished.dtype == np.float64
    assert (punished <= 0).all() and (punished >= -factor).all()
    assert (np.diff(punished) <= 0).all()
    assert (punished[np.sort(lengths) <= cap - buffer] == 0).all()


def test_shaping_adds_to_the_score_and_counts():
    options = RewardOptions(overlong_buffer_len=4, overlong_penalty_factor=2.0)
    score = np.array([1.0, 1.0, -1.0, -1.0])
    reward, sums = shape_rewards(score, np.array([6, 7, 10, 2]), options, 10)
    assert reward.tolist() == [1.0, 0.5, -3.0, -1.0]
    assert score.tolist() == [1.0, 1.0, -1.0, -1.0], "the scores given are left alone"
    assert sums == {"reward/overlong_penalty": (-2.5, 4.0), "reward/overlong_share": (2.0, 4.0)}


@pytest.mark.parametrize(("filtering", "kept"), [(False, [True] * 3), (True, [True, False, True])])
def test_overlong_filter(filtering, kept):
    keep = overlong_filter(np.array([False, True, False]), RewardOptions(overlong_filtering=filtering))
    assert keep.dtype == np.bool_ and keep.tolist() == kept
