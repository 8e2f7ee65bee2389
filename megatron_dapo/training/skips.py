"""Optimizer steps that are skipped: said at once, and after too many in a row the run stops, on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_dapo.types import InputError

Skip = Literal["nonfinite", "no_tokens", "no_groups"]
"""Why an optimizer step was skipped; ``no_groups``: a whole rollout step had nothing to train on."""

REASONS: dict[Skip, str] = {
    "nonfinite": "the gradient is not finite",
    "no_tokens": "no token is in the loss",
    "no_groups": "no group has a signal",
}
ADVICE: dict[Skip, str] = {
    "nonfinite": "look at --lr, at the weights it started from, and at this step's samples (--dump-rollouts, "
    "tools/inspect_rollouts.py) for rewards or log-probs out of line",
    "no_tokens": "look at response_length/clip_ratio: --overlong-filtering leaves truncated responses out, so raise "
    "--rollout-max-response-len or turn it off",
    "no_groups": "look at sampling/*, reward/* and the samples (--dump-rollouts): take problems the model solves sometimes, a "
    "reward that tells responses apart, or another --on-exhausted",
}


@dataclass
class SkippedUpdates:
    """Counts optimizer steps skipped in a row, over rollout steps; ``limit`` of them stop the run, 0 never does.

    What it is told is known to all ranks, so all of them stop together; what was saved before stays.
    """

    limit: int
    taken: int = 0
    row: list[Skip] = field(default_factory=list)

    def count(self, skipped: Skip | None, step: int) -> str | None:
        """One more optimizer step of rollout ``step``; a sentence for the console where it was skipped.

        Raises:
            InputError: it was the last of too many in a row.
        """
        if skipped is None:
            self.taken, self.row = self.taken + 1, []
            return None
        self.row.append(skipped)
        if self.limit and len(self.row) >= self.limit:
            raise InputError(
                f"stopped in rollout step {step}: {len(self.row)} updates in a row were skipped ({self._why()}), "
                f"--max-skipped-updates is {self.limit}; {ADVICE[skipped]}; nothing of this step was saved"
            )
        if not self.limit and len(self.row) > 1:
            return None
        stop = f"the run stops after {self.limit} (--max-skipped-updates)" if self.limit else "told once"
        return f"  alarm: an update of rollout step {step} was skipped, {len(self.row)} in a row: {REASONS[skipped]}; {stop}"

    def end(self, step: int) -> str | None:
        """At the end of training; a sentence where it took no update.

        Raises:
            InputError: it took none, and a gradient was not finite.
        """
        if self.taken or not self.row:
            return None
        said = (
            f"not one update was taken up to rollout step {step} ({self._why()}): the policy is the one it started from"
        )
        if "nonfinite" in self.row:
            raise InputError(f"{said}; {ADVICE['nonfinite']}")
        return f"  alarm: {said}; {ADVICE[self.row[-1]]}"

    def _why(self) -> str:
        counts = {reason: self.row.count(reason) for reason in REASONS if reason in self.row}
        if len(counts) == 1:
            return REASONS[self.row[-1]]
        return ", ".join(f"{count} x {REASONS[reason]}" for reason, count in counts.items())
