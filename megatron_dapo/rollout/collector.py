"""Collection of a step's rollouts, on rank 0: prompts, sampling, rewards, recorded rollouts, and the state of all that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.algorithm.advantages import RunningStatistics
from megatron_dapo.config import Options
from megatron_dapo.data.problems import Problems
from megatron_dapo.data.prompts import PromptCursor
from megatron_dapo.rewards.watch import WatchedRewards
from megatron_dapo.rollout.budget import make_budget
from megatron_dapo.rollout.engine import Engine
from megatron_dapo.rollout.replay import dump_rollouts, load_rollouts
from megatron_dapo.rollout.sampler import DynamicSampler
from megatron_dapo.rollout.trajectories import build_trajectories
from megatron_dapo.text_metrics import text_sums
from megatron_dapo.types import Group, Sums, Trajectories, merge_sums

Progress = Callable[[int, int, int], None]


class Collector:
    """Collects the groups of a step and turns them into trajectories. Lives on rank 0."""

    def __init__(
        self,
        options: Options,
        problems: Problems | None,
        engine: Engine,
        run_dir: str | Path,
        seed: int,
        faults: str | Path | None = None,
    ) -> None:
        self.options = options
        self.seed = seed
        self.run_dir = Path(run_dir)
        self.engine = engine
        self.problems = problems
        self.running = RunningStatistics()
        self.rewards = WatchedRewards(options.reward, Path(faults or self.run_dir))
        self.sampler = self._sampler() if problems and problems.train else None

    def _sampler(self) -> DynamicSampler:
        assert self.problems is not None
        cursor = PromptCursor(self.problems.train, self.seed, self.options.data.rollout_shuffle)
        params = self.options.train_sampling(self.problems.stop_token_ids)
        budget = make_budget(self.options)
        return DynamicSampler(self.options, self.seed, cursor, self.engine, self._judge, budget, params)

    def _judge(self, groups: list[Group]) -> Sums:
        """The verdicts on a wave, and how much of it the tokenizer cannot read."""
        assert self.problems is not None
        samples = [sample for group in groups for sample in group.samples]
        unknown = sum(self.problems.tokenizer.unknown(sample.token_ids) for sample in samples)
        tokens = sum(sample.length for sample in samples)
        return {**self.rewards.score(groups), "sampling/unknown_ids": (float(unknown), float(tokens))}

    def collect(self, step: int, progress: Progress | None = None) -> tuple[Trajectories, Sums]:
        """The trajectories of rollout step ``step``: sampled, or read back from a dump."""
        sampled: Sums = {}
        if self.options.replay.load_rollouts:
            groups = load_rollouts(self.options.replay.load_rollouts, step)
        else:
            assert self.sampler is not None
            batch = self.sampler.collect(progress)
            groups, sampled = batch.groups, batch.report
            sampled = merge_sums(sampled, self.engine.report())
        if self.options.replay.dump_rollouts:
            dump_rollouts(self.run_dir / "rollouts", step, groups)
        rows, shaped = build_trajectories(groups, self.options, self.running)
        text = text_sums([s for g in groups for s in g.samples])
        return rows, {**merge_sums(sampled, shaped), **text}

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides Megatron's checkpoint."""
        return {
            "sampler": self.sampler.state_dict() if self.sampler else None,
            "running": self.running.state_dict(),
            "rewards": self.rewards.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        if self.sampler is not None and state["sampler"] is not None:
            self.sampler.load_state_dict(state["sampler"])
        self.running.load_state_dict(state["running"])
        self.rewards.load_state_dict(state.get("rewards", {"known": []}))

    def close(self) -> None:
        """Stop the reward workers."""
        self.rewards.close()
