"""The table of metrics: every number a run logs has a row here, with its unit and what it says.

Names follow verl where published curves use them. A number that is logged but has no row is an error in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from megatron_dapo.types import Sums


class Metric(NamedTuple):
    """A row of ``METRICS``: the unit of a value, and what it says."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "critic/score/mean": Metric("reward", "task score before shaping, over the samples trained on"),
    "critic/score/max": Metric("reward", "its largest value"),
    "critic/rewards/mean": Metric("reward", "score plus the soft overlong punishment"),
    "critic/rewards/max": Metric("reward", "its largest value"),
    "critic/rewards/clipfrac": Metric("share", "samples whose reward was clipped before normalising"),
    "critic/advantages/mean": Metric("advantage", "advantage a sample, after normalising and clipping"),
    "critic/advantages/std": Metric("advantage", "its standard deviation over the samples"),
    "critic/advantages/max": Metric("advantage", "its largest value"),
    "critic/advantages/clipfrac": Metric("share", "samples whose advantage was clipped"),
    "prompt_length/mean": Metric("tokens", "prompt, over the samples trained on"),
    "prompt_length/max": Metric("tokens", "longest prompt"),
    "response_length/mean": Metric("tokens", "response, stop id included, over the samples trained on"),
    "response_length/max": Metric("tokens", "longest response"),
    "response_length/clip_ratio": Metric("share", "responses that the length cap ended"),
    "actor/pg_loss": Metric("loss", "policy loss a token of the loss, by the aggregation mode"),
    "actor/kl_loss": Metric("nats", "k3 estimate of KL(pi, reference) a token, where the loss has that term"),
    "actor/entropy": Metric("nats", "entropy of the policy a token; healthy between 0.1 and 1.5"),
    "actor/pg_clipfrac": Metric("share", "tokens whose gradient the upper or lower clip cut"),
    "actor/pg_clipfrac_lower": Metric("share", "tokens cut by the dual clip"),
    "actor/ppo_kl": Metric("nats", "mean of log pi_old - log pi: how far the updates have moved"),
    "actor/ratio_mean": Metric("ratio", "mean of pi / pi_old; 1 in the first update of a rollout"),
    "actor/grad_norm": Metric("norm", "global gradient norm before clipping, mean of the updates"),
    "actor/lr": Metric("rate", "learning rate, mean of the updates"),
    "actor/loss_tokens": Metric("tokens", "tokens in the loss an update: the denominator"),
    "actor/zero_prob": Metric(
        "share", "tokens left out of the loss: the policy, or the one before it, gives them probability 0"
    ),
    "actor/skipped_no_tokens": Metric(
        "share", "updates skipped because no token was in the loss, or no group had a signal"
    ),
    "actor/skipped_nonfinite": Metric("share", "updates skipped because the gradient was not finite"),
    "reward/overlong_penalty": Metric("reward", "soft overlong punishment a sample, 0 or below"),
    "reward/overlong_share": Metric("share", "samples that it touched"),
    "reward/no_answer": Metric("share", "generated samples without an answer to judge"),
    "reward/timeout": Metric("share", "generated samples whose verifier ran out of time"),
    "reward/error": Metric("share", "generated samples whose verifier failed"),
    "reward/seconds": Metric("s", "scoring a wave"),
    "sampling/acc": Metric("share", "right among all generated samples, before filtering"),
    "sampling/keep_rate": Metric("share", "generated groups neither all right nor all wrong"),
    "sampling/all_right": Metric("share", "generated groups that are all right"),
    "sampling/all_wrong": Metric("share", "generated groups that are all wrong"),
    "sampling/unscored": Metric("share", "generated groups that no verifier judged"),
    "sampling/waves": Metric("count", "generation batches of the step"),
    "sampling/generated_groups": Metric("count", "groups generated in the step"),
    "sampling/discarded_groups": Metric("count", "groups with a signal beyond the batch, dropped"),
    "sampling/generated_tokens": Metric("tokens", "response tokens generated in the step"),
    "sampling/kept_tokens": Metric("tokens", "response tokens of the groups kept"),
    "sampling/unknown_ids": Metric(
        "share", "generated tokens whose id has no token: rows that pad the model's embedding"
    ),
    "sampling/response_length": Metric("tokens", "response, over all generated samples"),
    "moe/<name>": Metric(
        "loss", "auxiliary loss of the routers without its coefficient, mean over layers and micro-batches"
    ),
    "mismatch/logprob_abs_diff": Metric("nats", "mean |log pi_old - log pi_rollout| a token"),
    "mismatch/logprob_abs_diff/max": Metric("nats", "largest |log pi_old - log pi_rollout| of a token"),
    "mismatch/ratio_below_half": Metric("share", "tokens whose pi_old / pi_rollout is below 1/2"),
    "mismatch/ratio_above_two": Metric("share", "tokens whose pi_old / pi_rollout is above 2"),
    "mismatch/k3": Metric("nats", "k3 estimate of KL(pi_rollout, pi_old) a token"),
    "mismatch/probe/max": Metric("nats", "largest difference of the log-prob probe between a server and the trainer"),
    "rollout/staleness/mean": Metric("versions", "weights that trained minus weights that generated the oldest token"),
    "rollout/staleness/max": Metric("versions", "its largest value"),
    "rollout/lost": Metric("share", "samples that no server could give"),
    "rollout/retries": Metric("count", "requests sent again after a failure"),
    "rollout/rerouted": Metric("count", "requests sent elsewhere because their server was marked failed"),
    "rollout/resumed": Metric("count", "samples cut short at a server and continued from their tokens"),
    "rollout/cached_tokens": Metric("share", "prompt tokens found in the servers' prefix caches"),
    "mismatch/tis_clipfrac": Metric("share", "tokens whose importance weight was capped or masked"),
    "text/distinct_2": Metric("share", "distinct bigrams among all bigrams of a sample of responses"),
    "text/repetition_4": Metric("share", "repeated 4-grams within a response, mean"),
    "timing_s/step": Metric("s", "wall time of the step"),
    "timing_s/reward": Metric(
        "s", "scoring of all waves of the step: part of gen, or beside training where generation is"
    ),
    "timing_s/<part>": Metric("s", "wall time of a part: gen, old_log_prob, update_actor, testing ..."),
    "perf/throughput": Metric("tokens/s", "trained tokens (prompt and response) a second and rank"),
    "perf/max_memory_gb": Metric("GB", "peak memory of a rank"),
    "perf/mfu": Metric(
        "share", "model FLOPs of the updates over the GPUs' dense bf16 peak, where the GPU is known (bf16 only)"
    ),
    "val-core/<source>/acc/mean@<k>": Metric("share", "avg@k: right among k samples per problem"),
    "val-core/<source>/acc/se": Metric("share", "standard error of avg@k over problems"),
    "val-core/<source>/acc/pass@<k>": Metric("share", "unbiased: a right one among k samples"),
    "val-core/<source>/acc/maj@<k>": Metric("share", "problems whose majority answer is right"),
    "val-core/<source>/response_length/mean": Metric("tokens", "evaluation response"),
    "val-core/<source>/response_length/clip_ratio": Metric("share", "responses that the cap ended"),
    "val-core/<source>/unscored": Metric("share", "evaluation samples without a verdict, left out"),
}
"""Every metric there is. ``<k>`` stands for a number, any other ``<...>`` for any text."""


def _pattern(name: str) -> str:
    escaped = re.escape(name).replace("<k>", r"\d+")
    return re.sub(r"<\w+>", ".+", escaped)


_KNOWN = re.compile("|".join(f"(?:{_pattern(name)})" for name in METRICS))


def row_of(name: str) -> str | None:
    """The row of ``METRICS`` that explains ``name``, the most exact one; None where none does."""
    if name in METRICS:
        return name
    return next((row for row in METRICS if re.fullmatch(_pattern(row), name)), None)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``METRICS`` does not explain, sorted."""
    return sorted(name for name in names if not _KNOWN.fullmatch(name))


def average(sums: Sums) -> dict[str, float]:
    """Divide once, at the top: name -> sum / count. What was never counted is left out."""
    return {name: total / count for name, (total, count) in sums.items() if count}
