"""Dynamic sampling (paper section 3.2, algorithm 1): waves until a step has enough groups with a signal.

A group has a signal when its samples are neither all right nor all wrong. That is judged by the raw
correctness ``acc``: shaped rewards differ inside an all-wrong group as soon as one response is overlong, and
would reward being wrong briefly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dapo.algorithm.filtering import has_verdict, verdict_of
from megatron_dapo.config import Options
from megatron_dapo.rollout.budget import Budget
from megatron_dapo.rollout.engine import Engine, request_seed
from megatron_dapo.types import Group, InputError, Prompt, Request, SamplingParams, Sums, merge_sums

Progress = Callable[[int, int, int], None]
"""Called with (groups kept, groups wanted, waves so far)."""


class PromptSource(Protocol):
    """An endless stream of prompts: ``data.prompts.PromptCursor``."""

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        ...


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of a step, in the order they were submitted, and what sampling them took.

    ``groups`` are ``target`` = rollout_batch_size many, with two exceptions: on_exhausted ``train_partial``
    (and ``repeat`` without a group to repeat) returns the ``accepted`` groups there are, 0 .. target;
    ``keep_zero_signal`` never fills up with groups that no verifier judged. ``repeat`` returns the same group
    several times. ``report`` counts all that was generated, kept or not.
    """

    groups: list[Group]
    report: Sums
    accepted: int
    target: int

    @property
    def exhausted(self) -> bool:
        """True where the limits of the step, not its target, ended the sampling."""
        return self.accepted < self.target


class DynamicSampler:
    """Collects the groups of one rollout step after the other.

    Groups are accepted in the order they were submitted, never in the order they finished, which would favour
    short responses. A group's identity is its serial number ``order`` within the run: a prompt may come back
    within a step. With one sample per prompt no group can be mixed, so every group is kept. ``score`` fills the
    samples' verdicts in place (``RewardPool.score``); ``clock`` counts seconds.

    A step is a transaction: an exception inside it (an engine that dies, a keyboard interrupt) puts
    everything back to where the step began, and ``state_dict`` taken during a step is that of its beginning,
    so no prompt is ever lost.
    """

    def __init__(
        self,
        options: Options,
        seed: int,
        prompts: PromptSource,
        engine: Engine,
        score: Callable[[list[Group]], Sums],
        budget: Budget,
        params: SamplingParams,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self.limits = options, options.sampler
        self.target = options.rollout.rollout_batch_size
        self.group_size = options.rollout.n_samples_per_prompt
        self.filters = options.sampler.dynamic_sampling and self.group_size > 1
        self.seed, self.prompts, self.engine = seed, prompts, engine
        self.score, self.budget, self.params, self.clock = score, budget, params, clock
        self.next_order = 0
        self.surplus: list[Group] = []
        self.totals: Sums = {}
        self._before: dict[str, Any] | None = None

    def collect(self, progress: Progress | None = None) -> RolloutBatch:
        """Sample one step.

        Raises:
            InputError: the limits are reached, and --on-exhausted is error.
        """
        self._before = self.state_dict()
        try:
            batch = self._collect(progress or (lambda kept, target, waves: None))
        except BaseException:
            self.load_state_dict(self._before)
            raise
        finally:
            self._before = None
        self.totals = merge_sums(self.totals, batch.report)
        return batch

    def _collect(self, progress: Progress) -> RolloutBatch:
        started, waves = self.clock(), 0
        kept, self.surplus = self.surplus[: self.target], self.surplus[self.target :]
        generated: list[Group] = []
        reports: list[Sums] = []
        progress(len(kept), self.target, waves)
        while len(kept) < self.target and not self._exhausted(waves, started):
            groups, report = self._wave(self.target - len(kept))
            waves += 1
            generated += groups
            kept += [g for g in groups if self._accepts(g)]
            reports.append(report)
            progress(min(len(kept), self.target), self.target, waves)
        kept, extra = kept[: self.target], kept[self.target :]
        if self.limits.surplus == "keep":
            self.surplus += extra
        counts: Sums = {
            "sampling/waves": (float(waves), 1.0),
            "sampling/generated_groups": (float(len(generated)), 1.0),
            "sampling/generated_tokens": (float(_tokens(generated)), 1.0),
            "sampling/discarded_groups": (float(len(extra) if self.limits.surplus == "drop" else 0), 1.0),
            "sampling/kept_tokens": (float(_tokens(kept)), 1.0),
        }
        report = merge_sums(counts, *reports)
        groups = self._fill_up(kept, generated, report, self.clock() - started)
        return RolloutBatch(groups, report, len(kept), self.target)

    def _accepts(self, group: Group) -> bool:
        return not self.filters or verdict_of(group) == "mixed"

    def _exhausted(self, waves: int, started: float) -> bool:
        late = waves > 0 and self.clock() - started >= self.limits.max_gen_seconds
        return late or waves >= self.limits.max_num_gen_batches

    def _wave(self, missing: int) -> tuple[list[Group], Sums]:
        """Take prompts, generate and score: the wave's groups in order, and what they were like."""
        size = self.budget.next_wave(missing) if self.filters else missing
        prompts = self.prompts.take(size)
        assert len(prompts) == size >= 1, f"{len(prompts)} prompts for a wave of {size}"
        first, self.next_order = self.next_order, self.next_order + size
        requests = [
            Request(prompt, request_seed(self.seed, order, index))
            for order, prompt in enumerate(prompts, first)
            for index in range(self.group_size)
        ]
        samples = self.engine.generate(requests, self.params)
        assert len(samples) == len(requests), f"{len(samples)} samples for {len(requests)} requests"
        groups = [
            Group(prompt, samples[place * self.group_size : (place + 1) * self.group_size], first + place)
            for place, prompt in enumerate(prompts)
        ]
        scoring = self.score(groups)
        if self.filters:
            self.budget.observe(sum(verdict_of(g) == "mixed" for g in groups), size)
        return groups, merge_sums(scoring, self._describe(groups))

    def _describe(self, groups: list[Group]) -> Sums:
        """Statistics of everything a wave generated, whatever becomes of it."""
        samples = [s for g in groups for s in g.samples]
        judged = [s.acc for s in samples if has_verdict(s)]
        verdicts = [verdict_of(g) for g in groups]
        count = float(len(groups))
        passing = len(groups) if self.group_size == 1 else verdicts.count("mixed")
        report: Sums = {
            "sampling/all_right": (float(verdicts.count("all_right")), count),
            "sampling/all_wrong": (float(verdicts.count("all_wrong")), count),
            "sampling/unscored": (float(verdicts.count("unscored")), count),
            "sampling/keep_rate": (float(passing), count),
            "sampling/response_length": (float(_tokens(groups)), float(len(samples))),
        }
        if judged:
            report["sampling/acc"] = (float(sum(judged)), float(len(judged)))
        return report

    def _fill_up(self, kept: list[Group], seen: list[Group], report: Sums, seconds: float) -> list[Group]:
        """What --on-exhausted makes of a step that ended short."""
        if len(kept) == self.target:
            return kept
        policy = self.limits.on_exhausted
        if policy == "error":
            waves, (passing, generated) = report["sampling/waves"][0], report["sampling/keep_rate"]
            raise InputError(
                f"only {len(kept)} of {self.target} groups with a signal after {waves:.0f} waves in "
                f"{seconds:.0f} s, keep rate {passing / generated:.1%}; raise --max-num-gen-batches "
                f"{self.limits.max_num_gen_batches} or --max-gen-seconds {self.limits.max_gen_seconds:g}, "
                "take prompts the model solves sometimes, or set --on-exhausted"
            )
        if policy == "keep_zero_signal":
            level = [g for g in seen if verdict_of(g) not in ("mixed", "unscored")]
            return kept + level[: self.target - len(kept)]
        if policy == "repeat" and kept:
            return list(itertools.islice(itertools.cycle(kept), self.target))
        return kept

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs, picklable; taken during a step, it is the state before that step."""
        if self._before is not None:
            return self._before
        return {
            "prompts": self.prompts.state_dict(),
            "next_order": self.next_order,
            "surplus": list(self.surplus),
            "budget": self.budget.state_dict(),
            "totals": dict(self.totals),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken."""
        self.prompts.load_state_dict(state["prompts"])
        self.next_order = state["next_order"]
        self.surplus = [g for g in state["surplus"] if len(g.samples) == self.group_size]  # others no step can use
        if others := len(state["surplus"]) - len(self.surplus):
            print(
                f"{others} groups kept for this step are left out: --n-samples-per-prompt is {self.group_size} now",
                flush=True,
            )
        self.budget.load_state_dict(state["budget"])
        self.totals = dict(state["totals"])


def _tokens(groups: list[Group]) -> int:
    return sum(s.length for g in groups for s in g.samples)
