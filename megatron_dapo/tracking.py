"""What a run tells: table of metrics, ``metrics.jsonl``, W&B, TensorBoard, console line, alarms, clock.

Names follow verl where published curves use them. A number that is logged but has no row in ``METRICS`` is an
error in the tests.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megatron_dapo.config import TrackingOptions
from megatron_dapo.types import InputError, Sums


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
    "actor/skipped_no_tokens": Metric("share", "updates skipped because no token was in the loss"),
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
    "rollout/rerouted": Metric("count", "requests sent elsewhere because their server was given up"),
    "rollout/resumed": Metric("count", "samples cut short at a server and continued from their tokens"),
    "rollout/cached_tokens": Metric("share", "prompt tokens found in the servers' prefix caches"),
    "mismatch/tis_clipfrac": Metric("share", "tokens whose importance weight was capped or masked"),
    "text/distinct_2": Metric("share", "distinct bigrams among all bigrams of a sample of responses"),
    "text/repetition_4": Metric("share", "repeated 4-grams within a response, mean"),
    "timing_s/step": Metric("s", "wall time of the step"),
    "timing_s/<part>": Metric("s", "wall time of a part: gen, old_log_prob, update_actor, testing ..."),
    "perf/throughput": Metric("tokens/s", "trained tokens (prompt and response) a second and rank"),
    "perf/max_memory_gb": Metric("GB", "peak memory of a rank"),
    "perf/mfu": Metric("share", "model FLOPs of the updates over the hardware's peak"),
    "val-core/<source>/acc/mean@<k>": Metric("share", "avg@k: right among k samples a problem"),
    "val-core/<source>/acc/se": Metric("share", "standard error of avg@k over problems"),
    "val-core/<source>/acc/pass@<k>": Metric("share", "unbiased: a right one among k samples"),
    "val-core/<source>/acc/maj@<k>": Metric("share", "problems whose majority answer is right"),
    "val-core/<source>/response_length/mean": Metric("tokens", "evaluation response"),
    "val-core/<source>/response_length/clip_ratio": Metric("share", "responses that the cap ended"),
    "val-core/<source>/unscored": Metric("share", "evaluation samples without a verdict, left out"),
}
"""Every metric there is. ``<k>`` stands for a number, any other ``<...>`` for any text."""

LENGTH_DROP, LENGTH_WINDOW = 0.3, 10


def _pattern(name: str) -> str:
    escaped = re.escape(name).replace("<k>", r"\d+")
    return re.sub(r"<\w+>", ".+", escaped)


_KNOWN = re.compile("|".join(f"(?:{_pattern(name)})" for name in METRICS))


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``METRICS`` does not explain, sorted."""
    return sorted(name for name in names if not _KNOWN.fullmatch(name))


def average(sums: Sums) -> dict[str, float]:
    """Divide once, at the top: name -> sum / count. What was never counted is left out."""
    return {name: total / count for name, (total, count) in sums.items() if count}


class Clock:
    """Seconds by part of a step. Parts are flat: one at a time, the same one as often as wanted.

    Example::

        with clock("gen"):
            ...
        clock.lap()  # {"timing_s/gen": 41.2, "timing_s/other": 0.3, "timing_s/step": 41.5}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._parts: dict[str, float] = {}
        self._running: str | None = None
        self._started: float | None = None

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what happens inside to ``part``."""
        assert self._running is None, f"clock({part!r}) inside clock({self._running!r}): parts do not nest"
        before = self._now()
        # The first step begins with its first part, so that building the model is not in it.
        self._started = before if self._started is None else self._started
        self._running = part
        try:
            yield
        finally:
            self._running = None
            self._parts[part] = self._parts.get(part, 0.0) + self._now() - before

    def lap(self) -> dict[str, float]:
        """``timing_s/<part>`` since the last lap, ``/step`` (wall time) and ``/other`` (in no part)."""
        now = self._now()
        step = now - (now if self._started is None else self._started)
        parts, self._parts, self._started = self._parts, {}, now
        rest = max(0.0, step - sum(parts.values()))
        seconds = {f"timing_s/{part}": value for part, value in parts.items()}
        return seconds | {"timing_s/other": rest, "timing_s/step": step}


class Tracker:
    """Writes every step's metrics: always to ``<run_dir>/metrics.jsonl``, if wanted to W&B and TensorBoard.

    With ``enabled`` False (all ranks but 0) every method does nothing. The W&B run id is ``resume_id``, or
    the one that ``<run_dir>/wandb_id`` remembers, or new; so a resumed run goes on in its W&B run, drawn over
    its own axis ``rollout/step``. W&B takes nothing back: steps that are run again appear twice there.

    Raises:
        InputError: W&B is to be online and refuses (no API key, no such entity).
    """

    def __init__(
        self,
        run_dir: str | Path,
        options: TrackingOptions,
        *,
        enabled: bool,
        wandb_project: str | None = None,
        wandb_entity: str | None = None,
        wandb_name: str | None = None,
        tensorboard_dir: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_id: str | None = None,
    ) -> None:
        self.enabled = enabled
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "metrics.jsonl"
        self._wandb_id = resume_id
        self._wandb: Any = None
        self._tensorboard: Any = None
        self._tensorboard_dir = tensorboard_dir
        self._purge_step: int | None = None
        if not enabled:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if options.wandb_mode != "disabled":
            self._wandb = self._start_wandb(
                mode=options.wandb_mode,
                project=wandb_project or "megatron-dapo",
                entity=wandb_entity,
                name=wandb_name or self.run_dir.name,
                config=dict(config or {}),
            )

    def _start_wandb(self, **wanted: Any) -> Any:
        import wandb

        remembered = self.run_dir / "wandb_id"
        if self._wandb_id is None and remembered.is_file():
            self._wandb_id = remembered.read_text().strip()
        self._wandb_id = self._wandb_id or uuid.uuid4().hex[:8]
        online = wanted["mode"] == "online"
        try:
            run = wandb.init(
                **wanted,
                id=self._wandb_id,
                resume="allow" if online else None,
                dir=str(self.run_dir),
                settings=wandb.Settings(console="off", silent=not online),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(f"--wandb-mode {wanted['mode']}: {reason} Or use --wandb-mode offline") from error
        remembered.write_text(self._wandb_id + "\n")
        run.define_metric("rollout/step")
        run.define_metric("*", step_metric="rollout/step")
        return run

    def state_dict(self) -> dict[str, Any]:
        """What a resume hands back as ``resume_id``: ``{"wandb_id": ...}``, None without W&B."""
        return {"wandb_id": self._wandb_id}

    def truncate_after(self, step: int) -> None:
        """Resume at ``step``: lines of later steps, to be run again, move to ``metrics.jsonl.bak-<n>``.

        So does a line that a killed run left half-written. A run that begins at 0 writes step 0 itself, so
        nothing older stays.
        """
        if not self.enabled:
            return
        self._purge_step = step + 1
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines(keepends=True)
        parts: dict[bool, list[str]] = {True: [], False: []}
        for line in lines:
            parts[step > 0 and line.endswith("\n") and json.loads(line)["step"] <= step].append(line)
        if not parts[False]:
            return
        number = 1 + sum(1 for _ in self.run_dir.glob("metrics.jsonl.bak-*"))
        (self.run_dir / f"metrics.jsonl.bak-{number}").write_text("".join(parts[False]))
        replace_text(self.path, "".join(parts[True]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one JSON line ``{"step": ..., "time": <Unix seconds>, <name>: <number or null>, ...}``.

        ``step`` counts finished rollout steps; null stands for NaN and infinities, which JSON lacks. The line
        is on disk on return.
        """
        if not self.enabled:
            return
        finite = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self._wandb is not None:
            self._wandb.log({"rollout/step": step, **values})
        if self._tensorboard_dir:
            for name, value in values.items():
                self._writer().add_scalar(name, value, step)
            self._writer().flush()

    def _writer(self) -> Any:
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(self._tensorboard_dir, purge_step=self._purge_step)
        return self._tensorboard

    def close(self) -> None:
        """Flush W&B and TensorBoard; more than once is fine."""
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._wandb = self._tensorboard = None


def replace_text(path: Path, text: str) -> None:
    """Write ``path`` in one stroke: a reader sees the old text or the new, never half of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    os.replace(draft, path)


def console_line(step: int, total: int, values: Mapping[str, float]) -> str:
    """One line on step ``step`` of ``total``; what ``values`` lacks is left out.

    Example: ``step 12/500 | acc 0.41 | score -0.18 | len 5312 (clip 3.1%) | H 0.42 | clip 0.21% | gnorm 0.11
    | kept 61% (2.1 batches) | gen 412s train 260s sync 9s | 1234 tok/s`` (trained tokens a second and rank).
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
) -> dict[str, str]:
    """What is wrong with the last step of ``history`` (one mapping a step): its kind -> a sentence.

    Entropy (nats) outside ``entropy_range``, responses 30% shorter than ten steps before, a keep rate below
    1 / max_num_gen_batches, log-probs of the engine further than ``mismatch_warn`` nats a token from the trainer's.
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
            f"the engine's log-probs are {gap:.3g} nats a token from the trainer's, above {mismatch_warn:g}: "
            "docs/weight_sync.md says where to look"
        )
    keep = now.get("sampling/keep_rate")
    if keep is not None and keep < 1 / max_num_gen_batches:
        found["keep rate"] = (
            f"keep rate {keep:.1%} is below 1 / {max_num_gen_batches} gen batches: "
            "steps will end short; take problems the model solves sometimes"
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
