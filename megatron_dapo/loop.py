"""The loop: collect -> old log-probs -> updates -> publish -> track -> evaluate and save when due.

One program on every rank. Only rank 0 samples, scores and tracks (``Collector``); what it collects is broadcast, and
from there on all ranks compute the same plan.
"""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from megatron_dapo import compat
from megatron_dapo.config import Options
from megatron_dapo.data.packing import split_minibatches
from megatron_dapo.data.problems import Problems, load_problems
from megatron_dapo.distributed.collectives import any_rank, from_rank0, merge_over_ranks, on_rank0
from megatron_dapo.distributed.launcher import STOP_SIGNALS
from megatron_dapo.eval_record import EvalRecord, describe_setup
from megatron_dapo.evaluation import EvalReport, evaluate
from megatron_dapo.rollout.ahead import Ahead
from megatron_dapo.rollout.collector import Collector
from megatron_dapo.rollout.engine import ENGINES, Engine
from megatron_dapo.rollout.replay import NoEngine, check_recorded
from megatron_dapo.tracking import Clock, check_places
from megatron_dapo.tracking.reporter import Reporter, Silent
from megatron_dapo.training import checkpoint
from megatron_dapo.training.batch import Minibatch, build_minibatch
from megatron_dapo.training.flops import utilisation
from megatron_dapo.training.model_flags import notes
from megatron_dapo.training.probe import policy_of
from megatron_dapo.training.setup import build_trainer, shut_down
from megatron_dapo.training.skips import SkippedUpdates
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import InputError, Sums, Trajectories, merge_sums
from megatron_dapo.weights.gather import save_hf

T = TypeVar("T")


def train(args: Namespace, options: Options) -> None:
    """Run DAPO from the recipe's start, or from where the run's own checkpoint left off."""
    if options.eval.eval_name:
        raise InputError(
            f"--eval-name {options.eval.eval_name}: eval reads it; training names its own step_000004 and so on"
        )
    run = Run(args, options)
    clock, trainer = run.clock, run.trainer
    try:
        run.say_where_it_begins()
        if run.evaluates(before_training=True):
            run.evaluate(run.first_step)
        for step in range(run.first_step, options.rollout.num_rollout):
            with clock("gen"):
                rows, metrics = run.collect(step)
            with clock("prepare"):
                batches = run.split(rows, step)
            with clock("old_log_prob"):
                trainer.fill_old_logprobs(batches)
                trainer.fill_reference_logprobs(batches)
            with clock("update_actor"):
                metrics = merge_sums(metrics, *run.update(batches, step))
            metrics = run.merge(metrics)
            with clock("update_weights"):
                run.publish(step + 1)
            if run.evaluates(after=step):
                run.evaluate(step + 1)
            stop = run.should_stop() or run.mismatch != ""
            if run.saves(after=step) or stop:
                run.save(step + 1)
            if run.exports(after=step):
                run.export(step + 1)
            run.report(step + 1, rows, metrics)
            if stop:
                break
        run.reporter.note(run.skips.end(run.last_step))
    finally:
        run.close()
    shut_down()
    if run.mismatch:
        raise InputError(run.mismatch)


def staleness(rows: Trajectories, step: int) -> Sums:
    """How many versions the weights behind the samples' oldest tokens are behind those they are trained on."""
    behind = step - rows.weight_version
    if len(behind) == 0:
        return {}
    return {
        "rollout/staleness/mean": (float(behind.sum()), float(len(behind))),
        "rollout/staleness/max": (float(behind.max()), 1.0),
    }


class Run:
    """The pieces of a run and the few decisions between them; every method is called by all ranks."""

    def __init__(self, args: Namespace, options: Options, evaluation_only: bool = False) -> None:
        self.args, self.options, self.clock = args, options, Clock()
        self.started, self.signalled, self.mismatch = time.monotonic(), False, ""
        self.skips, self.last_step = SkippedUpdates(options.update.max_skipped_updates), 0
        if args.rank == 0:
            checkpoint.check_checkpoints(args)
            check_places(args.run_dir, options.tracking.wandb_mode, args.tensorboard_dir)
            check_recorded(None if evaluation_only else options.replay.load_rollouts, options.rollout.num_rollout)
        said = notes(args) if not checkpoint.has_checkpoint(args.save) else []
        problems = load_problems(args, options, evaluation_only) if args.rank == 0 else None
        self.evaluation = self._evaluation(problems, evaluation_only) if problems and problems.eval else None
        self.trainer: Trainer = build_trainer(args, options)
        self.engine = self._engine(problems)
        self.first_step: int = args.iteration if args.resumed else 0
        self.collector = on_rank0(lambda: self._collector(problems, restore=args.resumed and not evaluation_only))
        self.reporter = on_rank0(lambda: Reporter(args, options, self.first_step, not evaluation_only)) or Silent()
        for line in said:
            self.reporter.note(line)
        self.ahead = on_rank0(self._begin_ahead) if self.options.overlap.rollout_mode != "sync" else None
        self.publish(self.first_step)
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _evaluation(self, problems: Problems, evaluation_only: bool) -> EvalRecord:
        """What the evaluations are of; rank 0's."""
        setup, weights = describe_setup(self.args, self.options, problems.eval, problems.stop_token_ids), None
        if evaluation_only:
            iteration = checkpoint.named_iteration(self.args, self.args.save)
            weights = {"path": os.path.abspath(self.args.save), "iteration": iteration}
            named = f"evaluating {self.args.save}" + ("" if iteration is None else f", iteration {iteration}")
            print(named, flush=True)
        return EvalRecord(self.args, setup, weights)

    def _engine(self, problems: Problems | None) -> Engine:
        if self.options.replay.load_rollouts and not self.options.eval.eval_prompt_data:
            return NoEngine()
        make, decode = ENGINES[self.options.rollout.rollout_engine], problems.tokenizer.decode if problems else None
        return make(self.args, self.options, policy_of(self.trainer), decode, print)

    def _collector(self, problems: Problems | None, restore: bool) -> Collector:
        """Rank 0's."""
        faults = self.evaluation.folder if self.evaluation else None
        found = Collector(self.options, problems, self.engine, self.args.run_dir, self.args.seed, faults)
        if restore:
            found.load_state_dict(checkpoint.load_rollout_state(self.args))
        return found

    def _begin_ahead(self) -> Ahead[tuple[Trajectories, Sums]]:
        """Rank 0's thread that generates beside training."""
        assert self.collector is not None
        overlap, last = self.options.overlap, self.options.rollout.num_rollout
        lead = 1 if overlap.rollout_mode == "one_step_off" else overlap.max_staleness
        return Ahead(self.collector.collect, self.collector.state_dict, self.first_step, last, lead)

    def _ask(self, ask: Callable[[Collector], T]) -> T:
        """Rank 0 asks while the others follow the engine; its answer, or its refusal, reaches every rank."""

        def followed() -> T:
            assert self.collector is not None
            try:
                return ask(self.collector)
            finally:
                self.engine.release()

        if self.collector is None:
            self.engine.follow()
        return from_rank0(followed)

    def say_what_is_long(self) -> None:
        """Lengths beyond what the model's files state."""
        for note in self.args.notes:
            self.reporter.note(f"note: {note}")

    def say_where_it_begins(self) -> None:
        """Of a resumed run: from which step it goes on, and what its recipe says otherwise than before."""
        last = self.options.rollout.num_rollout
        self.say_what_is_long()
        if self.args.resumed:
            others = f", with {'; '.join(self.args.changed)}" if self.args.changed else ""
            self.reporter.note(f"resumed after rollout {self.first_step}/{last}{others}")
            if self.first_step >= last:
                self.reporter.note(f"nothing is left to do: --num-rollout is {last}; raise it to train on")

    def collect(self, step: int) -> tuple[Trajectories, Sums]:
        """The step's trajectories on every rank; its metrics on rank 0."""
        if self.options.overlap.rollout_mode != "sync":
            rows, metrics = from_rank0(lambda: self.ahead.take(step))  # type: ignore[union-attr]
        else:
            bar = self.reporter.progress_bar(step)
            rows, metrics = self._ask(lambda collector: collector.collect(step, bar))
            if bar:
                bar.close()
        return rows, metrics | staleness(rows, step) if self.collector else {}

    def split(self, rows: Trajectories, step: int) -> list[Minibatch]:
        """The optimizer steps of this rollout: whole groups, shuffled by the seed, this rank's share packed."""
        if self.options.replay.rollout_only or len(rows) == 0:
            return []
        steps = min(-(-len(rows) // self.args.global_batch_size), self.options.update.num_steps_per_rollout)
        parts = split_minibatches(rows.group, steps, self.args.seed + step)
        return [build_minibatch(rows.take(part), self.options, self.trainer.layout) for part in parts]

    def update(self, batches: list[Minibatch], step: int) -> list[Sums]:
        """The step's optimizer steps.

        Raises:
            InputError: too many in a row were skipped.
        """
        self.last_step, done = step + 1, []
        for batch in batches:
            done.append(self.trainer.update(batch))
            self.reporter.note(self.skips.count(self.trainer.skipped, step + 1))
        if not (batches or self.options.replay.rollout_only):
            self.reporter.note(self.skips.count("no_groups", step + 1))
            done.append({"actor/skipped_no_tokens": (1.0, 1.0)} if self.collector else {})
        return done

    def publish(self, version: int) -> None:
        """The engine generates with these weights from now on; one step off, when what is under way has ended."""
        between_steps = self.options.overlap.rollout_mode == "one_step_off"
        with self.ahead.idle() if self.ahead and between_steps else nullcontext():
            self.engine.publish(version)
        if self.ahead:
            self.ahead.publish(version)

    def merge(self, local: Sums) -> Sums:
        """The step's metrics of all ranks, on every rank; what --mismatch-stop says to them."""
        merged, limit = merge_over_ranks(local), self.options.mismatch.mismatch_stop
        total, count = merged.get("mismatch/logprob_abs_diff", (0.0, 0.0))
        if limit is not None and count and not total / count <= limit:  # NaN is above every limit
            self.mismatch = (
                f"the engine's log-probs differ from the trainer's by {total / count:.3g} nats per token, --mismatch-stop is "
                f"{limit:g}: the step is saved, and the run stopped; docs/weight_sync.md says where to look"
            )
        return merged

    def evaluates(self, after: int = -1, before_training: bool = False) -> bool:
        """True where an evaluation is due: before the first step if asked for, every --eval-interval, and at the end."""
        if not self.options.eval.eval_prompt_data:
            return False
        if before_training:
            return self.options.eval.eval_before_train and self.first_step == 0
        return self._due(after, self.args.eval_interval)

    def saves(self, after: int) -> bool:
        """True where a checkpoint is due: every --save-interval, and at the end; never with 0."""
        never = self.args.saves_never or self.options.replay.rollout_only
        return self._due(after, self.args.save_interval) and not never

    def _due(self, step: int, interval: int | None) -> bool:
        return bool(interval and ((step + 1) % interval == 0 or step + 1 == self.options.rollout.num_rollout))

    def evaluate(self, step: int) -> EvalReport:
        """Evaluate; rank 0 writes the report."""
        with self.clock("testing"), self.ahead.idle() if self.ahead else nullcontext():
            report = self._ask(self._evaluate)
        self.reporter.evaluated(step, report, self.evaluation)
        return report

    def _evaluate(self, collector: Collector) -> EvalReport:
        assert collector.problems is not None
        params = self.options.eval_sampling(collector.problems.stop_token_ids)
        return evaluate(
            self.engine, collector.problems.eval, self.options, params, collector.rewards.score, self.args.seed
        )

    def save(self, step: int) -> None:
        """Checkpoint everything that a resume needs.

        Raises:
            InputError: a weight is not finite: nothing is written over what can be resumed from.
        """
        self._check_weights(step)
        with self.clock("save_checkpoint"):
            state = self.collector.state_dict() if self.collector else None
            checkpoint.save(self.trainer, step, self.ahead.state_dict(step) if self.ahead else state)

    def exports(self, after: int) -> bool:
        """True where a Hugging Face export is due."""
        return self._due(after, self.options.model.save_hf_interval)

    def export(self, step: int) -> None:
        """Write the policy as a Hugging Face checkpoint. Raises: as ``save``."""
        self._check_weights(step)
        with self.clock("export"), self.trainer.inference():
            recipe = f" of recipe {os.path.basename(self.args.recipe)}" if self.args.recipe else ""
            origin = f"After rollout step {step}{recipe}."
            save_hf(self.trainer.model, self.args.hf_checkpoint, f"{self.args.run_dir}/hf/step_{step:06d}", origin)

    def _check_weights(self, step: int) -> None:
        if any_rank(not self.trainer.weights_are_finite()):
            raise InputError(
                f"after rollout step {step} the weights hold NaN or infinities: not saved; what was saved before stays "
                f"({self.args.save}); look at actor/grad_norm and --lr, and resume from there"
            )

    def report(self, step: int, rows: Trajectories, merged: Sums) -> None:
        """Rank 0 logs the step's metrics and prints its line."""
        tokens, seconds = int(sum(len(t) for t in rows.tokens)), self.clock.lap()
        trained = "actor/grad_norm" in merged
        share = utilisation(self.args, rows, seconds["timing_s/update_actor"]) if trained else None
        self.reporter.step(step, merged, seconds, tokens, compat.max_memory_gb(), share)

    def should_stop(self) -> bool:
        """After a signal on any rank, or past --exit-duration-in-mins; the step is finished and saved first."""
        limit = self.args.exit_duration_in_mins
        return any_rank(self.signalled or (limit is not None and time.monotonic() - self.started > 60 * limit))

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.signalled:
            raise KeyboardInterrupt
        self.signalled = True
        self.reporter.note(f"signal {number}: finishing this step, saving, stopping; once more stops at once")

    def close(self) -> None:
        """Stop workers, flush trackers."""
        for part in (self.ahead, self.collector, self.reporter, self.engine):
            if part is not None:
                part.close()
