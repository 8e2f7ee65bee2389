"""How many prompts the next wave of dynamic sampling asks for."""

from __future__ import annotations

import math
from typing import Any, Protocol

from megatron_dapo.config import Options
from megatron_dapo.types import InputError


class Budget(Protocol):
    """Sizes of waves, learned from what earlier waves gave."""

    def next_wave(self, missing: int) -> int:
        """Prompts of the next wave, at least 1, while ``missing`` >= 1 groups with a signal are wanted."""
        ...

    def observe(self, with_signal: int, generated: int) -> None:
        """A wave of ``generated`` >= 1 groups held ``with_signal`` groups that passed the filter."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        ...


class FixedBudget:
    """Every wave is ``wave_size`` prompts (the released recipe: 3 x the groups of a step)."""

    def __init__(self, wave_size: int) -> None:
        self.wave_size = wave_size

    def next_wave(self, missing: int) -> int:
        """``wave_size``, whatever is missing."""
        assert missing >= 1
        return self.wave_size

    def observe(self, with_signal: int, generated: int) -> None:
        """Learns nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class YieldAdaptiveBudget:
    """Ask for what is missing over the keep rate so far: few prompts when most groups pass, more when few do.

    ``ceil(missing / rate * (1 + margin))``, at least 1 and at most ``wave_size``, which bounds how long a
    single wave can take (the limits of a step are looked at between waves). Until a wave was seen, and while
    none ever passed, a wave is full. ``rate`` is a moving average in which a full wave weighs 1 - ``ema`` and
    a smaller one proportionally less, so that a refill of two prompts cannot swing it. The size of a wave
    depends on earlier waves only, never on the responses in it, so which groups are kept stays unbiased.
    """

    def __init__(self, wave_size: int, margin: float, ema: float) -> None:
        if margin < 0:
            raise InputError(f"--budget-margin {margin}: must be 0 or more (0.1 asks for 10% more)")
        if not 0 <= ema < 1:
            raise InputError(f"--budget-ema {ema}: must lie in 0 .. 1, below 1 (0.7 is usual)")
        self.wave_size, self.margin, self.ema = wave_size, margin, ema
        self.rate: float | None = None

    def next_wave(self, missing: int) -> int:
        """Prompts expected to hold ``missing`` groups with a signal, and ``margin`` more."""
        assert missing >= 1
        if not self.rate:
            return self.wave_size
        wanted = round(missing / self.rate * (1 + self.margin), 9)  # 10 x 1.1 is 11 and no more
        return max(1, math.ceil(min(wanted, self.wave_size)))

    def observe(self, with_signal: int, generated: int) -> None:
        """Move the average towards this wave's keep rate."""
        seen = with_signal / generated
        past = self.ema ** (generated / self.wave_size)
        self.rate = seen if self.rate is None else past * self.rate + (1 - past) * seen

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the average of ``state``; a state of another kind of budget starts afresh."""
        self.rate = state.get("rate")


def make_budget(options: Options) -> Budget:
    """The budget that ``--sampling-budget`` names.

    Raises:
        InputError: its numbers make no sense.
    """
    sampler = options.sampler
    if sampler.sampling_budget == "yield_adaptive":
        return YieldAdaptiveBudget(options.wave_size, sampler.budget_margin, sampler.budget_ema)
    return FixedBudget(options.wave_size)
