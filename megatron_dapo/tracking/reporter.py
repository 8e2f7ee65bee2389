"""What rank 0 reports: the files a run leaves, the trackers, one console line per step."""

from __future__ import annotations

import json
import os
import platform as machine
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_dapo import __version__
from megatron_dapo.compat import default_flags
from megatron_dapo.config import Options
from megatron_dapo.config.recipe import write_recipe
from megatron_dapo.eval_record import EvalRecord
from megatron_dapo.evaluation import EvalReport, metrics, write_report
from megatron_dapo.rewards.watch import no_answer_hint
from megatron_dapo.tracking import RolloutProgress, Tracker, alarms, average, console_line
from megatron_dapo.types import Sums


class Silent:
    """The reporter of every rank but 0."""

    def progress_bar(self, step: int) -> RolloutProgress | None:
        """None: nothing is shown."""
        return None

    def evaluated(self, step: int, report: EvalReport, record: EvalRecord | None) -> None:
        """Nothing is written."""

    def step(
        self, step: int, sums: Sums, seconds: dict[str, float], tokens: int, memory_gb: float, mfu: float | None = None
    ) -> None:
        """Nothing is logged."""

    def note(self, text: str | None) -> None:
        """Nothing is said."""

    def close(self) -> None:
        """Nothing to flush."""


class Reporter(Silent):
    """Writes ``recipe.toml``, ``env.json``, ``metrics.jsonl`` and ``eval/``; prints; feeds W&B and TensorBoard. With
    ``records`` False only ``eval/`` is written: a look at a run changes nothing of it."""

    def __init__(self, args: Namespace, options: Options, first_step: int, records: bool = True) -> None:
        self.options = options
        self.world_size = args.world_size
        self.run_dir = Path(args.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if records:
            write_recipe(self.run_dir / "recipe.toml", args.resolved)
            (self.run_dir / "env.json").write_text(json.dumps(_environment(args), indent=1) + "\n")
        self.tracker = Tracker(
            self.run_dir,
            options.tracking,
            enabled=records,
            wandb_project=args.wandb_project,
            wandb_entity=args.wandb_entity,
            wandb_name=args.wandb_exp_name,
            tensorboard_dir=args.tensorboard_dir,
            config=args.resolved,
        )
        self.tracker.truncate_after(first_step)
        self.history: list[dict[str, float]] = []
        self.pending: dict[str, float] = {}
        self.sounding: set[str] = set()

    def progress_bar(self, step: int) -> RolloutProgress:
        """The bar of one step's sampling."""
        return RolloutProgress(
            f"rollout {step + 1}",
            self.options.rollout.rollout_batch_size,
            enabled=self.options.tracking.progress,
        )

    def evaluated(self, step: int, report: EvalReport, record: EvalRecord | None) -> None:
        """Write the report of an evaluation, training's own where it has no name; its numbers join the step's metrics."""
        assert record is not None
        values, setup, name = metrics(report), record.setup(step), record.name
        folder = write_report(report, self.run_dir, step, setup, name)
        self.note(f"eval after {step} rollouts | " + report.headline())
        expected = name or f"step_{step:06d}"
        if folder.name != expected:
            self.note(f"  {folder.parent / expected} holds another evaluation and stays; this one is in {folder}")
        elif name:
            self.note(f"  report: {folder}")
        if step == 0:
            self.tracker.log(0, values)
        else:
            self.pending.update(values)

    def step(
        self,
        step: int,
        sums: Sums,
        seconds: dict[str, float],
        tokens: int,
        memory_gb: float,
        mfu: float | None = None,
    ) -> None:
        """Log a finished rollout step and print its line; ``tokens`` were trained on, over all ranks, at a share of ``mfu`` of
        what the hardware can do, where that is known."""
        values = average(sums) | seconds | self.pending
        self.pending = {}
        if "reward/seconds" in sums:
            values["timing_s/reward"] = sums["reward/seconds"][0]
        if mfu is not None:
            values["perf/mfu"] = mfu
        values["perf/throughput"] = tokens / seconds["timing_s/step"] / self.world_size
        values["perf/max_memory_gb"] = memory_gb
        self.tracker.log(step, values)
        self.history.append(values)
        self.note(console_line(step, self.options.rollout.num_rollout, values))
        self._sound_alarms()

    def _sound_alarms(self) -> None:
        """A sentence when something goes wrong, not again while it stays so."""
        entropy_range = self.options.tracking.alarm_entropy or (0.1, 1.5)
        warn = self.options.mismatch.mismatch_warn
        hint = no_answer_hint(self.options.reward)
        now = alarms(self.history, self.options.sampler.max_num_gen_batches, entropy_range, warn, hint)
        for kind in now.keys() - self.sounding:
            self.note(f"  alarm: {now[kind]}")
        self.sounding = set(now)

    def note(self, text: str | None) -> None:
        """One line on the console, at once; none for an empty ``text``."""
        if text:
            print(text, flush=True)

    def close(self) -> None:
        """Flush the trackers."""
        self.tracker.close()


def _environment(args: Namespace) -> dict[str, Any]:
    return {
        "megatron_dapo": __version__,
        "torch": torch.__version__,
        "python": machine.python_version(),
        "host": machine.node(),
        "command": sys.argv,
        "world_size": args.world_size,
        "flags_of_this_machine": default_flags(),  # what it lacks is in no recipe
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }
