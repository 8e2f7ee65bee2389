"""Rewards under watch: what makes their verdicts useless is said at once, not after a night of training.

The first fault of each kind is printed with its traceback and kept in a file of the run. A first wave in which no sample got
a verdict stops the run; one without an answer to judge, or whose verdicts are all the same, is an alarm.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards.pool import Fault, RewardPool
from megatron_dapo.rewards.registry import reward_for
from megatron_dapo.types import Group, InputError, Prompt, Sample, Sums

FAULTS_FILE = "reward_errors.txt"
LONGEST_RESPONSE = 2000
"""Characters of a response that are kept beside its fault: its end, where the answer is."""


class WatchedRewards:
    """A ``RewardPool`` that speaks up; ``folder`` is where ``reward_errors.txt`` is written, at the first fault."""

    def __init__(self, options: RewardOptions, folder: Path) -> None:
        self.options, self.path = options, folder / FAULTS_FILE
        self.pool = RewardPool(options, self._on_fault)
        self._told: dict[tuple[str, str], str] = {}  # (reward, kind of fault) -> its last line
        self._looked = False

    def score(self, groups: list[Group]) -> Sums:
        """As ``RewardPool.score``.

        Raises: ``InputError`` as there, and where no sample of the first wave got a verdict.
        """
        sums = self.pool.score(groups)
        if not self._looked:
            self._looked = True
            self._look([sample for group in groups for sample in group.samples])
        return sums

    def _look(self, samples: list[Sample]) -> None:
        """What the first wave says of the reward."""
        status = [sample.status for sample in samples]
        judged = [sample for sample in samples if sample.status in ("ok", "no_answer")]
        name, n = self.options.reward, len(samples)
        if not judged:
            first = next(iter(self._told.values()), "it returned this status itself")
            late = status.count("timeout")
            longer = f", or raise --reward-timeout-s {self.options.reward_timeout_s:g}" if late else ""
            raise InputError(
                f"--reward {name}: no verdict on any of the first {n} samples ({n - late} errors, {late} timeouts; first: "
                f"{first}): nothing to train on or to report; fix the reward{longer}; {self.path} has the details"
            )
        scores = {(sample.score, sample.acc) for sample in judged}
        if all(sample.status == "no_answer" for sample in judged):
            _say(f"alarm: not one of the first {n} responses has an answer to judge: {no_answer_hint(self.options)}")
        elif len(scores) == 1 and len(judged) > 1:
            ((score, acc),) = scores
            _say(
                f"alarm: the first {len(judged)} responses all got score {score:g}, acc {acc:g}: the reward does not tell them "
                "apart, so there is nothing to learn from them; look at some (--dump-rollouts, tools/inspect_rollouts.py)"
            )

    def _on_fault(self, fault: Fault) -> None:
        if (fault.reward, fault.kind) in self._told:
            return
        lines = fault.what.strip().splitlines() or ["it gave no reason"]
        self._told[fault.reward, fault.kind] = lines[-1][:300]
        again = "kept in" if self._keep(fault) else "which could not be written to"
        _say(
            f"alarm: --reward {fault.reward} gave no verdict on a sample ({fault.kind}; told once, {again} {self.path}):"
        )
        print("\n".join(f"    {line}" for line in lines), flush=True)

    def _keep(self, fault: Fault) -> bool:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        text = (
            f"=== {when} --reward {fault.reward}: {fault.kind}\n{fault.what.strip()}\n"
            f"--- answer: {fault.answer}\n--- response (its end): {fault.response[-LONGEST_RESPONSE:]}\n\n"
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError:
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """The pool's."""
        return self.pool.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.pool.load_state_dict(state)

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()


def no_answer_hint(options: RewardOptions) -> str:
    """Where to look when responses hold no answer that the reward can read."""
    if options.reward in ("auto", "math") and options.verifier_mode == "verl_compat":
        return (
            "--verifier-mode verl_compat reads a line 'Answer: ...' in the last 300 characters and nothing else, not \\boxed{}; "
            "do the prompts ask for it? (--prompt-template dapo does; --verifier-mode strict reads both)"
        )
    return "do the prompts ask for the form that the reward reads, and is --rollout-max-response-len long enough to reach it?"


def form_warning(prompts: Sequence[Prompt], options: RewardOptions) -> str | None:
    """A sentence where prompts ask for an answer in a form that the reward does not read; None where none does."""
    if options.verifier_mode != "verl_compat":
        return None
    maths = [p for p in prompts if reward_for(p, options) == "math"]
    boxed = [
        p for p in maths if re.search(r"\\boxed\b", p.text) and not re.search(r"answer\s*:", p.text, re.IGNORECASE)
    ]
    if not boxed:
        return None
    return (
        f"warning: {len(boxed)} of {len(maths)} prompts ask for \\boxed{{}}, which --verifier-mode verl_compat never reads (only "
        "a line 'Answer: ...'): their responses would score -1 for ever; use --verifier-mode strict, or prompts that ask for "
        "such a line (--prompt-template dapo)"
    )


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
