"""From the groups of a step to the columns that are trained on: shaping, masks, advantages."""

from __future__ import annotations

import numpy as np

from megatron_dapo.algorithm.advantages import RunningStatistics, compute_advantages
from megatron_dapo.algorithm.filtering import has_verdict
from megatron_dapo.algorithm.shaping import overlong_filter, shape_rewards
from megatron_dapo.config import Options
from megatron_dapo.types import BoolArray, FloatArray, Group, IntArray, Sums, Trajectories, merge_sums


def build_trajectories(
    groups: list[Group], options: Options, running: RunningStatistics | None = None
) -> tuple[Trajectories, Sums]:
    """The samples of ``groups`` as columns, in the order given; with them ``critic/*`` and length metrics.

    The task score is shaped by the response's length (paper eq. 13), then turned into advantages by the
    statistics that ``options.advantage`` names (``running`` is updated with them). Two kinds of samples keep
    their row but leave the loss and its denominator, their ``loss_mask`` being False throughout: truncated
    ones under ``overlong_filtering``, which group statistics still see, and those without a verdict, which
    they do not. ``group`` counts the list: a group that is in it twice is two groups. No groups give no rows.
    """
    samples = [s for g in groups for s in g.samples]
    group_N = np.repeat(np.arange(len(groups), dtype=np.int64), [len(g.samples) for g in groups])
    score_N = np.array([s.score for s in samples], dtype=np.float64)
    length_N = np.array([s.length for s in samples], dtype=np.int64)
    truncated_N = np.array([s.truncated for s in samples], dtype=np.bool_)
    judged_N = np.array([has_verdict(s) for s in samples], dtype=np.bool_)
    sources = [g.prompt.data_source for g in groups for _ in g.samples]
    for sample in samples:
        missing = sample.length - len(sample.logprobs)
        assert missing == 0, f"log-probs of {missing} of {sample.length} tokens are missing"

    reward_N: FloatArray = score_N.copy()
    advantage_N = np.zeros(len(samples))
    shaped: Sums = {}
    advantages: Sums = {}
    if judged_N.any():
        longest = options.rollout.rollout_max_response_len
        reward_N, shaped = shape_rewards(score_N, length_N, options.reward, longest)
        judged_sources = [source for source, judged in zip(sources, judged_N, strict=True) if judged]
        advantage_N[judged_N], advantages = compute_advantages(
            reward_N[judged_N], group_N[judged_N], options.advantage, judged_sources, running
        )
    trained_N = judged_N & overlong_filter(truncated_N, options.reward)
    rows = Trajectories(
        tokens=[np.concatenate([_ids(g), s.token_ids]) for g in groups for s in g.samples],
        prompt_lengths=np.array([len(g.prompt.token_ids) for g in groups for _ in g.samples], dtype=np.int64),
        rollout_logprobs=[s.logprobs for s in samples],
        loss_mask=[np.full(s.length, trained) for s, trained in zip(samples, trained_N, strict=True)],
        advantages=advantage_N,
        rewards=reward_N,
        acc=np.array([s.acc for s in samples], dtype=np.float64),
        group=group_N,
        weight_version=np.array([s.weight_version for s in samples], dtype=np.int64),
    )
    return rows, {**merge_sums(shaped, advantages), **_describe(rows, score_N, truncated_N, judged_N)}


def _ids(group: Group) -> IntArray:
    return np.array(group.prompt.token_ids, dtype=np.int64)


def _describe(rows: Trajectories, score_N: FloatArray, truncated_N: BoolArray, judged_N: BoolArray) -> Sums:
    """verl's names, over the samples trained on; ``critic/*`` over those with a verdict, a sample counting
    once.
    """
    columns = {
        "critic/score": score_N[judged_N],
        "critic/rewards": rows.rewards[judged_N],
        "critic/advantages": rows.advantages[judged_N],
        "response_length": rows.response_lengths,
        "prompt_length": rows.prompt_lengths,
    }
    report: Sums = {}
    for name, values in columns.items():
        if len(values):
            report[f"{name}/mean"] = (float(values.sum()), float(len(values)))
            report[f"{name}/max"] = (float(values.max()), 1.0)
    if len(rows):
        report["response_length/clip_ratio"] = (float(truncated_N.sum()), float(len(rows)))
    return report
