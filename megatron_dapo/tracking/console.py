"""What the screen shows of a run: the line of a step, alarms, the progress bar."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from tqdm import tqdm

LENGTH_DROP, LENGTH_WINDOW = 0.3, 10
WITHOUT_VERDICT, WITHOUT_ANSWER, ALL_ALIKE = 0.1, 0.5, 0.95
"""Shares from which alarms sound: samples that no reward judged, responses without an answer, groups of one verdict."""


def console_line(step: int, total: int, values: Mapping[str, float]) -> str:
    """One line on step ``step`` of ``total``; what ``values`` lacks is left out.

    Example: ``step 12/500 | acc 0.41 | score -0.18 | len 5312 (clip 3.1%) | H 0.42 | clip 0.21% | gnorm 0.11
    | kept 61% (2.1 batches) | gen 412s train 260s sync 9s | 1234 tok/s`` (trained tokens per second and rank).
    """

    def shown(template: str, name: str) -> str:
        return template.format(values[name]) if name in values else ""

    def seconds(label: str, part: str) -> str:
        taken = values.get(f"timing_s/{part}")
        return "" if taken is None else f"{label} {taken:.{1 if taken < 10 else 0}f}s"

    times = [seconds("gen", "gen"), seconds("train", "update_actor"), seconds("sync", "update_weights")]
    parts = [
        f"step {step}/{total}",
        shown("acc {:.2f}", "sampling/acc"),
        shown("score {:.2f}", "critic/score/mean"),
        shown("len {:.0f}", "response_length/mean") + shown(" (clip {:.1%})", "response_length/clip_ratio"),
        shown("H {:.2f}", "actor/entropy"),
        shown("clip {:.2%}", "actor/pg_clipfrac"),
        shown("gnorm {:.3g}", "actor/grad_norm"),
        *[
            f"{values[name]:.0%} of the updates SKIPPED ({why})"
            for name, why in (("actor/skipped_nonfinite", "not finite"), ("actor/skipped_no_tokens", "no tokens"))
            if values.get(name)
        ],
        shown("kept {:.0%}", "sampling/keep_rate") + shown(" ({:.3g} batches)", "sampling/waves"),
        " ".join(t for t in times if t),
        shown("{:.0f} tok/s", "perf/throughput"),
    ]
    return " | ".join(part.strip() for part in parts if part)


def alarms(
    history: Sequence[Mapping[str, float]],
    max_num_gen_batches: int,
    entropy_range: Sequence[float],
    mismatch_warn: float = math.inf,
    no_answer_hint: str = "do the prompts ask for the form that the reward reads?",
) -> dict[str, str]:
    """What is wrong with the last step of ``history`` (one mapping a step): its kind -> a sentence.

    Entropy (nats) outside ``entropy_range``, responses 30% shorter than ten steps before, a keep rate below
    1 / max_num_gen_batches, log-probs of the engine further than ``mismatch_warn`` nats per token from the trainer's,
    a tenth of the samples without a verdict, half of them without an answer (``no_answer_hint`` says what to do).
    """
    now, found = history[-1], {}
    entropy, (lowest, highest) = now.get("actor/entropy"), entropy_range
    if entropy is not None and entropy < lowest:
        found["low entropy"] = f"entropy {entropy:.3f} is below {lowest:g}: the policy is collapsing"
    if entropy is not None and entropy > highest:
        found["high entropy"] = f"entropy {entropy:.3f} is above {highest:g}: the policy turns to noise"
    length = now.get("response_length/mean")
    before = history[-1 - LENGTH_WINDOW].get("response_length/mean") if len(history) > LENGTH_WINDOW else None
    if length is not None and before is not None and length < (1 - LENGTH_DROP) * before:
        found["length"] = (
            f"responses fell from {before:.0f} to {length:.0f} tokens in {LENGTH_WINDOW} steps: look at what they say now"
        )
    gap = now.get("mismatch/logprob_abs_diff")
    if gap is not None and gap > mismatch_warn:
        found["mismatch"] = (
            f"the engine's log-probs are {gap:.3g} nats per token from the trainer's, above {mismatch_warn:g}: "
            "docs/weight_sync.md says where to look"
        )
    return found | _signal_alarms(now, max_num_gen_batches, no_answer_hint)


def _signal_alarms(now: Mapping[str, float], max_num_gen_batches: int, no_answer_hint: str) -> dict[str, str]:
    """What keeps a step from having something to learn from: the reward, the form of the answers, or the problems."""
    found = {}
    errors, timeouts = now.get("reward/error", 0.0), now.get("reward/timeout", 0.0)
    silent, mute = errors + timeouts, now.get("reward/no_answer", 0.0)
    if silent >= WITHOUT_VERDICT:
        found["reward"] = (
            f"the reward gave no verdict on {silent:.0%} of the samples ({errors:.0%} errors, {timeouts:.0%} timeouts): "
            "reward_errors.txt in the run's folder has the first of each kind"
        )
    if mute >= WITHOUT_ANSWER:
        found["no answer"] = f"{mute:.0%} of the responses have no answer to judge: {no_answer_hint}"
    keep = now.get("sampling/keep_rate")
    if keep is None or keep >= 1 / max_num_gen_batches or silent >= WITHOUT_ANSWER or mute >= WITHOUT_ANSWER:
        return found
    why = "take problems the model solves sometimes"
    for name, problems, verdict in (
        ("all_right", "easy", "always says right"),
        ("all_wrong", "hard", "never says right"),
    ):
        if now.get(f"sampling/{name}", 0.0) >= ALL_ALIKE:
            why = f"nearly all groups are {name.replace('_', ' ')}: the problems are too {problems}, or the reward {verdict}"
    found["keep rate"] = (
        f"keep rate {keep:.1%} is below 1 / {max_num_gen_batches} gen batches: steps will end short; {why}"
    )
    return found


class RolloutProgress:
    """Progress bar of one step's sampling; silent where stderr is no terminal, and with ``enabled`` False."""

    def __init__(self, label: str, target: int, *, enabled: bool = True) -> None:
        hidden = not (enabled and sys.stderr.isatty())
        self._bar = tqdm(total=target, desc=label, unit="group", leave=False, disable=hidden, file=sys.stderr)

    def __call__(self, kept: int, target: int, waves: int) -> None:
        """``kept`` of ``target`` groups after ``waves`` generation batches."""
        self._bar.total, self._bar.n = target, kept
        self._bar.set_postfix_str(f"kept {kept}/{target}, {waves} batches")

    def close(self) -> None:
        """Wipe the bar off the screen."""
        self._bar.close()
