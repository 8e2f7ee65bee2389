"""Advantages: the paper's numbers, the other normalisations, and what must hold of any rewards."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithm.advantages import RunningStatistics, compute_advantages
from megatron_dapo.config import AdvantageOptions

MODES = ("none", "group", "batch", "running")
REWARDS = st.floats(-3, 3, allow_nan=False, width=32)


def advantages(rewards: Any, groups: Any = None, sources: Any = None, running: Any = None, **options: Any) -> Any:
    """Without ``groups`` all rewards are one group; running statistics start empty."""
    group_N = np.zeros(len(rewards), np.int64) if groups is None else np.asarray(groups)
    started = RunningStatistics() if running is None else running
    return compute_advantages(np.array(rewards), group_N, AdvantageOptions(**options), sources, started)


@pytest.mark.parametrize(
    ("right", "up", "down"),
    [
        (1, 3.749993, -0.25),
        (2, 2.561734, -0.365962),
        (4, 1.677049, -0.559016),
        (8, 0.968245, -0.968245),
        (15, 0.25, -3.749993),
    ],
)
def test_sixteen_samples_of_a_prompt(right, up, down):
    values, _ = advantages([1.0] * right + [-1.0] * (16 - right))
    assert values == pytest.approx([up] * right + [down] * (16 - right), abs=1e-6)


def test_groups_need_not_be_contiguous():
    values, _ = advantages([1.0, 5.0, -1.0, 7.0], groups=[3, 9, 3, 9])
    one = np.sqrt(2) / (2 + 1e-6 * np.sqrt(2))
    assert values == pytest.approx([one, -one, -one, one], abs=1e-12)


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("mean", ["group", "batch", "running"])
@pytest.mark.parametrize(("reward", "samples"), [(0.7, 16), (0.1, 3), (0.1, 10), (-1 / 3, 7)])
def test_equal_rewards_give_exactly_zero(mean, std, reward, samples):
    """Rounding noise divided by rounding noise is not an advantage (NeMo-RL#4158)."""
    running = RunningStatistics()
    for _ in range(3):
        values, _ = advantages([reward] * samples, running=running, advantage_mean=mean, advantage_std=std)
        assert values.tolist() == [0.0] * samples


@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("mean", MODES)
def test_no_spread_never_becomes_a_spike(mean, std):
    """The same kind of fault where the mean is not the group's: one group is all 0.7, the other mixed."""
    values, _ = advantages(
        [0.7] * 16 + [1.0, -1.0] * 8, groups=[0] * 16 + [1] * 16, advantage_mean=mean, advantage_std=std
    )
    assert np.abs(values).max() < 3
    if std == "group":
        centre = {"none": 0.0, "group": 0.7, "batch": 0.35, "running": 0.35}[mean]
        assert values[:16] == pytest.approx([0.7 - centre] * 16, abs=1e-12)


@pytest.mark.parametrize("std", MODES)
def test_a_group_of_one_has_no_advantage(std):
    values, _ = advantages([1.0, -1.0, 1.0], groups=[0, 1, 1], advantage_std=std)
    assert values[0] == 0 and values[2] > 0 > values[1]


@pytest.mark.parametrize("mean", MODES)
@pytest.mark.parametrize("std", MODES)
def test_every_mean_with_every_deviation(mean, std):
    """Against the definition, spelt out a sample at a time."""
    draws = np.random.default_rng(1)
    earlier, rewards = draws.normal(size=6), draws.normal(size=8)
    groups, sources = [0, 0, 0, 1, 1, 1, 2, 2], ["a"] * 3 + ["b"] * 3 + ["a"] * 2
    running = RunningStatistics()
    running.update("a", earlier)
    values, _ = advantages(rewards, groups, sources, running, advantage_mean=mean, advantage_std=std)
    for i, value in enumerate(values):
        same_source = rewards[np.array(sources) == sources[i]]
        population = {
            "group": rewards[np.array(groups) == groups[i]],
            "batch": rewards,
            "running": np.concatenate([earlier, same_source]) if sources[i] == "a" else same_source,
        }
        centre = 0.0 if mean == "none" else np.mean(population[mean])
        scale = 1.0 if std == "none" else np.std(population[std], ddof=1) + 1e-6
        assert value == pytest.approx((rewards[i] - centre) / scale, abs=1e-12)


def test_clipping_before_and_after():
    values, sums = advantages(
        [5.0, 1.0, -1.0, -9.0],
        reward_clip=2.0,
        advantage_mean="none",
        advantage_std="none",
        advantage_clip=1.5,
    )
    assert values.tolist() == [1.5, 1.0, -1.0, -1.5]
    assert sums["critic/rewards/clipfrac"] == (2.0, 4.0) and sums["critic/advantages/clipfrac"] == (2.0, 4.0)
    assert sums["critic/advantages/max"] == (1.5, 1.0) and sums["critic/advantages/mean"] == (0.0, 4.0)
    assert sums["critic/advantages/std"] == (pytest.approx(np.std([1.5, 1, -1, -1.5], ddof=1)), 1.0)


def test_reward_clip_comes_before_the_statistics():
    values, _ = advantages([1.0, -1.0, -100.0], reward_clip=1.0)
    same, _ = advantages([1.0, -1.0, -1.0])
    assert values.tolist() == same.tolist()


def test_rewards_given_are_left_alone_and_must_be_finite():
    rewards = np.array([3.0, -3.0])
    compute_advantages(rewards, np.zeros(2, np.int64), AdvantageOptions(reward_clip=1.0, advantage_clip=0.1))
    assert rewards.tolist() == [3.0, -3.0]
    with pytest.raises(AssertionError, match="finite"):
        advantages([1.0, float("nan")])


def test_no_samples_no_advantages():
    values, sums = advantages([])
    assert len(values) == 0 and sums == {}


def test_only_running_modes_touch_the_running_statistics():
    running = RunningStatistics()
    advantages([1.0, -1.0], running=running)
    assert running.state_dict() == {}
    advantages([1.0, -1.0], running=running, advantage_std="running", sources=["a", "b"])
    assert running.state_dict() == {"a": [1, 1.0, 0.0], "b": [1, -1.0, 0.0]}


GROUPED = st.lists(st.tuples(st.integers(0, 3), REWARDS), min_size=1, max_size=24)


@given(GROUPED, st.sampled_from(["group", "none"]))
@settings(max_examples=60, deadline=None)
def test_advantages_of_a_group_sum_to_zero(rows, std):
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows], dtype=np.float64)
    values, _ = advantages(rewards, groups, advantage_std=std)
    for group in np.unique(groups):
        member = groups == group
        scale = max(1.0, np.abs(values[member]).max())
        assert abs(values[member].sum()) < 1e-8 * scale


@given(GROUPED, st.randoms(use_true_random=False), st.sampled_from(MODES), st.sampled_from(MODES))
@settings(max_examples=60, deadline=None)
def test_the_order_of_samples_does_not_matter(rows, random, mean, std):
    order = list(range(len(rows)))
    random.shuffle(order)
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows], dtype=np.float64)
    sources = [f"source-{g % 2}" for g in groups]
    there, _ = advantages(rewards, groups, sources, advantage_mean=mean, advantage_std=std)
    shuffled = [sources[i] for i in order]
    again, _ = advantages(rewards[order], groups[order], shuffled, advantage_mean=mean, advantage_std=std)
    assert again == pytest.approx(there[order], rel=1e-6, abs=1e-8)


@given(st.lists(st.lists(REWARDS, max_size=8), min_size=1, max_size=8).filter(any))
@settings(max_examples=60, deadline=None)
def test_merged_batches_equal_one_pass(batches):
    running = RunningStatistics()
    for batch in batches:
        running.update("s", np.array(batch, dtype=np.float64))
    everything = np.array([x for batch in batches for x in batch], dtype=np.float64)
    mean, std = running.mean_std("s")
    assert mean == pytest.approx(everything.mean(), abs=1e-9)
    assert std == pytest.approx(everything.std(ddof=1) if len(everything) > 1 else 0.0, abs=1e-7)


def test_running_statistics_keep_their_digits_far_from_zero():
    """The sum of squares minus the squared sum would lose all of them."""
    running = RunningStatistics()
    for _ in range(100):
        running.update("s", np.array([1e9, 1e9 + 1.0]))
    mean, std = running.mean_std("s")
    assert mean == 1e9 + 0.5 and std == pytest.approx(0.5 * np.sqrt(200 / 199), rel=1e-6)


def test_running_statistics_resume_through_json():
    draws = np.random.default_rng(0)
    first, second = draws.normal(size=5), draws.normal(size=7)
    through, stopped, resumed = RunningStatistics(), RunningStatistics(), RunningStatistics()
    through.update("s", first)
    stopped.update("s", first)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for statistics in (through, resumed):
        statistics.update("s", second)
    assert resumed.mean_std("s") == through.mean_std("s")
