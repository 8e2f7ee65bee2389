"""From rewards to advantages (paper equation 9): what is subtracted, what divides, what is clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_dapo.config import AdvantageOptions
from megatron_dapo.types import FloatArray, IntArray, Sums

EPS = 1e-6
"""Added to a standard deviation before it divides."""


class RunningStatistics:
    """Count, mean, squared deviations of all rewards seen, by data source (Welford's moments, Chan's merge).

    Example:
        running = RunningStatistics()
        running.update("math", np.array([1.0, -1.0]))
        running.mean_std("math")  # (0.0, 1.4142...)
    """

    def __init__(self) -> None:
        self.moments: dict[str, tuple[int, float, float]] = {}

    def update(self, source: str, values: FloatArray) -> None:
        """Take in a batch of rewards of ``source``; none change nothing."""
        if len(values) == 0:
            return
        count, mean, squares = self.moments.get(source, (0, 0.0, 0.0))
        added, center = len(values), _mean(values)
        total, delta = count + added, center - mean
        squares += float(((values - center) ** 2).sum()) + delta**2 * count * added / total
        self.moments[source] = (total, mean + delta * (added / total), squares)

    def mean_std(self, source: str) -> tuple[float, float]:
        """Mean and standard deviation (ddof 1; 0 after a single reward) of all rewards of ``source``."""
        count, mean, squares = self.moments[source]
        return mean, float(np.sqrt(squares / (count - 1))) if count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The moments, fit for JSON."""
        return {source: list(moments) for source, moments in self.moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.moments = {source: (int(n), float(m), float(s)) for source, (n, m, s) in state.items()}


def compute_advantages(
    reward_N: FloatArray,
    group_N: IntArray,
    options: AdvantageOptions,
    sources_N: Sequence[str] | None = None,
    running: RunningStatistics | None = None,
) -> tuple[FloatArray, Sums]:
    """Advantages, float64 [N], constant over the tokens of a response, and their metrics.

    ``clip((r' - mean) / (std + 1e-6), ±c_A)`` with ``r' = clip(r, ±c_r)``; mean and std (ddof 1) are each of
    the group (labels ``group_N``, in any order), of this batch, of all rewards so far of the sample's data
    source (``running``, which takes this batch in first), or none. Equal rewards give exactly 0 under a group
    or batch mean, and so does a group of one under a group mean. A std of at most 1e-6 is rounding noise and
    no scale: it does not divide.
    """
    reward = np.asarray(reward_N, dtype=np.float64)
    if len(reward) == 0:
        return reward, {}
    assert np.isfinite(reward).all(), f"rewards must be finite: {reward[~np.isfinite(reward)][:5]}"
    clipped = _clip(reward, options.reward_clip)
    sources = np.array(["all"] * len(reward) if sources_N is None else sources_N)
    if "running" in (options.advantage_mean, options.advantage_std):
        assert running is not None, "running statistics are kept by the caller"
        for source in np.unique(sources):
            running.update(str(source), clipped[sources == source])

    def statistic(kind: str, of: Callable[[FloatArray], float], place: int, none: float) -> FloatArray:
        """``of`` each sample's population, [N]; ``place`` finds the same number in ``mean_std``."""
        if kind == "group":
            return _by_label(np.asarray(group_N), clipped, of)
        if kind == "batch":
            return np.full(len(clipped), of(clipped))
        if kind == "running":
            assert running is not None
            return np.array([running.mean_std(str(source))[place] for source in sources])
        assert kind == "none", kind
        return np.full(len(clipped), none)

    std = statistic(options.advantage_std, _std, place=1, none=0.0)
    centred = clipped - statistic(options.advantage_mean, _mean, place=0, none=0.0)
    raw = centred / np.where(std > EPS, std + EPS, 1.0)
    advantage = _clip(raw, options.advantage_clip)
    n = float(len(reward))
    return advantage, {
        "critic/advantages/mean": (float(advantage.sum()), n),
        "critic/advantages/std": (_std(advantage), 1.0),
        "critic/advantages/max": (float(advantage.max()), 1.0),
        "critic/advantages/clipfrac": (float((advantage != raw).sum()), n),
        "critic/rewards/clipfrac": (float((clipped != reward).sum()), n),
    }


def _clip(values: FloatArray, limit: float | None) -> FloatArray:
    return values if limit is None else np.clip(values, -limit, limit)


def _by_label(labels: IntArray, values: FloatArray, of: Callable[[FloatArray], float]) -> FloatArray:
    out = np.empty(len(values))
    for label in np.unique(labels):
        out[labels == label] = of(values[labels == label])
    return out


def _mean(values: FloatArray) -> float:
    """The mean; of equal values exactly that value, which the rounding of a sum need not give."""
    low, high = float(values.min()), float(values.max())
    return low if low == high else float(values.mean())


def _std(values: FloatArray) -> float:
    """Standard deviation with ddof 1; 0 of one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
