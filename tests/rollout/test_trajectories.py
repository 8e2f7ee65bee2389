"""Groups to columns: shaping, masks, advantages, metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dapo.algorithm.advantages import RunningStatistics
from megatron_dapo.config import Options
from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rollout.trajectories import build_trajectories
from megatron_dapo.types import Group, Prompt, Sample


def sample(score: float, tokens: int = 3, **fields: Any) -> Sample:
    known: dict[str, Any] = {"finish_reason": "stop", "weight_version": 0, "text": "", "status": "ok"}
    ids, logprobs = 10 + np.arange(tokens), -0.5 * np.arange(tokens, dtype=np.float32)
    return Sample(ids, logprobs, score=score, acc=float(score > 0), **{**known, **fields})


def group(order: int, samples: list[Sample], prompt_tokens: int = 2, source: str = "math") -> Group:
    return Group(Prompt(f"row-{order}", "text", tuple(range(prompt_tokens)), "7", source), samples, order)


def options(**overrides: Any) -> Options:
    return Options.from_args(**{"rollout_max_response_len": 10, "overlong_buffer_len": 4, **overrides})


def test_columns():
    groups = [
        group(41, [sample(1.0, 3, weight_version=5), sample(-1.0, 1, weight_version=5)], prompt_tokens=2),
        group(17, [sample(-1.0, 4, weight_version=4), sample(1.0, 2, weight_version=4)], prompt_tokens=3),
    ]
    rows, _ = build_trajectories(groups, options())
    assert [t.tolist() for t in rows.tokens] == [
        [0, 1, 10, 11, 12],
        [0, 1, 10],
        [0, 1, 2, 10, 11, 12, 13],
        [0, 1, 2, 10, 11],
    ]
    assert all(t.dtype == np.int64 for t in rows.tokens)
    assert rows.prompt_lengths.tolist() == [2, 2, 3, 3] and rows.response_lengths.tolist() == [3, 1, 4, 2]
    assert [len(x) for x in rows.rollout_logprobs] == [3, 1, 4, 2]
    assert [m.tolist() for m in rows.loss_mask] == [[True] * n for n in (3, 1, 4, 2)]
    assert rows.group.tolist() == [0, 0, 1, 1] and rows.weight_version.tolist() == [5, 5, 4, 4]
    assert rows.acc.tolist() == [1, 0, 0, 1]
    one = 1 / (np.sqrt(2) + 1e-6)
    assert rows.advantages == pytest.approx([one, -one, -one, one])


@pytest.mark.parametrize(
    ("right", "up", "down"),
    [(1, 3.749993, -0.25), (2, 2.561734, -0.365962), (4, 1.677049, -0.559016), (8, 0.968245, -0.968245)],
)
def test_advantages_of_sixteen(right, up, down):
    scores = [1.0] * right + [-1.0] * (16 - right)
    rows, sums = build_trajectories([group(0, [sample(s) for s in scores])], options())
    assert rows.advantages == pytest.approx([up] * right + [down] * (16 - right), abs=2e-6)
    assert sums["critic/advantages/max"] == (pytest.approx(up, abs=2e-6), 1)
    assert sums["critic/advantages/mean"] == (pytest.approx(0, abs=1e-9), 16)


def test_soft_punishment_is_added_to_the_score_of_long_responses():
    lengths = [6, 7, 8, 10]
    samples = [sample(1.0, n) for n in lengths] + [sample(-1.0, 10, finish_reason="length")]
    rows, sums = build_trajectories([group(0, samples)], options())
    assert rows.rewards.tolist() == [1.0, 0.75, 0.5, 0.0, -2.0]
    assert sums["critic/score/mean"] == (3.0, 5) and sums["critic/rewards/mean"] == (0.25, 5)
    assert rows.acc.tolist() == [1, 1, 1, 1, 0], "shaping leaves correctness alone"
    assert rows.advantages[0] > rows.advantages[1] > rows.advantages[3] > rows.advantages[4]
    whole, _ = build_trajectories([group(0, samples)], options(overlong_buffer_len=0))
    assert whole.rewards.tolist() == [1, 1, 1, 1, -1]


def test_overlong_filtering_masks_but_group_statistics_still_see_the_sample():
    samples = [sample(1.0), sample(-1.0), sample(-1.0, 10, finish_reason="length")]
    plain, _ = build_trajectories([group(0, samples)], options(overlong_buffer_len=0))
    masked, _ = build_trajectories([group(0, samples)], options(overlong_buffer_len=0, overlong_filtering=True))
    assert [m.all() for m in plain.loss_mask] == [True, True, True]
    assert [m.any() for m in masked.loss_mask] == [True, True, False]
    assert [len(m) for m in masked.loss_mask] == [3, 3, 10]
    assert masked.advantages.tolist() == plain.advantages.tolist()


@pytest.mark.parametrize("lost", [{"status": "timeout"}, {"status": "error"}, {"finish_reason": "abort"}])
def test_a_sample_without_a_verdict_neither_trains_nor_moves_its_group(lost):
    judged = [sample(1.0), sample(-1.0), sample(-1.0)]
    alone, alone_sums = build_trajectories([group(0, judged)], options())
    rows, sums = build_trajectories([group(0, [judged[0], sample(-1.0, **lost), *judged[1:]])], options())
    assert [m.any() for m in rows.loss_mask] == [True, False, True, True]
    assert rows.advantages.tolist() == [alone.advantages[0], 0.0, *alone.advantages[1:]]
    assert sums["critic/score/mean"] == alone_sums["critic/score/mean"] == (-1.0, 3)


def test_rows_are_those_of_their_source_after_filtering():
    """Rewards, accuracies and tokens of what is kept stay together (NeMo-RL#3794)."""
    draws = np.random.default_rng(0)
    everything = [
        group(i, [sample(float(draws.choice([-1, 1])), int(draws.integers(1, 11))) for _ in range(4)])
        for i in range(20)
    ]
    kept = [g for g in everything if 0 < g.acc_G.sum() < 4]
    assert 0 < len(kept) < 20
    rows, _ = build_trajectories(kept, options())
    for row, one in enumerate(s for g in kept for s in g.samples):
        assert rows.rewards[row] == one.score + min(0.0, (6 - one.length) / 4)
        assert rows.acc[row] == one.acc and rows.response_lengths[row] == one.length
        assert (rows.rollout_logprobs[row] == one.logprobs).all()


def test_a_group_that_comes_twice_is_two_groups():
    twice = group(3, [sample(1.0), sample(-1.0)])
    rows, _ = build_trajectories([twice, twice], options())
    assert rows.group.tolist() == [0, 0, 1, 1]
    assert rows.advantages[:2].tolist() == rows.advantages[2:].tolist()


def test_running_statistics_are_kept_by_source():
    running = RunningStatistics()
    running_options = options(advantage_mean="running", advantage_std="none")
    first = [group(0, [sample(1.0), sample(1.0)], source="a"), group(1, [sample(-1.0)] * 2, source="b")]
    assert build_trajectories(first, running_options, running)[0].advantages.tolist() == [0, 0, 0, 0]
    second = [group(2, [sample(-1.0), sample(-1.0)], source="a")]
    assert build_trajectories(second, running_options, running)[0].advantages.tolist() == [-1, -1]


def test_no_groups_are_no_rows():
    rows, sums = build_trajectories([], options())
    assert len(rows) == 0 and sums == {}
    assert rows.take([]).group.dtype == np.int64


def test_groups_without_any_verdict():
    rows, sums = build_trajectories([group(0, [sample(-1.0, status="timeout")] * 2)], options())
    assert rows.advantages.tolist() == [0, 0] and not any(m.any() for m in rows.loss_mask)
    assert "critic/score/mean" not in sums and sums["response_length/mean"] == (6, 2)


def test_lengths_and_truncation_in_the_metrics():
    groups = [
        group(0, [sample(1.0, 10, finish_reason="length"), sample(-1.0, 2)], prompt_tokens=7),
        group(1, [sample(1.0, 4), sample(-1.0, 4)], prompt_tokens=1),
    ]
    _, sums = build_trajectories(groups, options())
    assert sums["response_length/mean"] == (20, 4) and sums["response_length/max"] == (10, 1)
    assert sums["response_length/clip_ratio"] == (1, 4)
    assert sums["prompt_length/mean"] == (16, 4) and sums["prompt_length/max"] == (7, 1)
    assert sums["critic/score/max"] == (1.0, 1)


def test_missing_logprobs_are_never_filled():
    short = sample(1.0, 3)
    short.logprobs = short.logprobs[:2]
    with pytest.raises(AssertionError, match="1 of 3 tokens"):
        build_trajectories([group(0, [short, sample(-1.0)])], options())


def test_from_texts_through_the_reward_pool():
    texts = ["So Answer: 7", "Answer: 8", "seven, I think", "Answer: 7."]
    groups = [group(0, [sample(0.0, text=t, status="error") for t in texts])]
    with RewardPool(options(reward_num_workers=0).reward) as pool:
        pool.score(groups)
    rows, sums = build_trajectories(groups, options())
    assert rows.acc.tolist() == [1, 0, 0, 1] and rows.rewards.tolist() == [1, -1, -1, 1]
    assert all(m.all() for m in rows.loss_mask) and sums["critic/score/mean"] == (0, 4)
