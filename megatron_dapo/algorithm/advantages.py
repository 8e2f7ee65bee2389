"""From rewards to advantages: which mean is subtracted, which deviation divides, what is clipped (paper equation 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dapo.config import AdvantageOptions
from megatron_dapo.types import FloatArray, IntArray, Sums

EPS = 1e-6
"""Added to a standard deviation before it divides."""


class RunningStatistics:
    """Count, mean and sum of squared deviations of every reward seen, by data source (Welford's update, merged batchwise)."""

    def __init__(self) -> None:
        self.moments: dict[str, tuple[int, float, float]] = {}

    def update(self, source: str, values: FloatArray) -> None:
        """Take in a batch of rewards of ``source``."""
        if len(values) == 0:
            return
        count, mean, squares = self.moments.get(source, (0, 0.0, 0.0))
        n, m = len(values), float(np.mean(values))
        delta, total = m - mean, count + n
        squares += float(np.sum((values - m) ** 2)) + delta**2 * count * n / total
        self.moments[source] = (total, mean + delta * n / total, squares)

    def mean_std(self, source: str) -> tuple[float, float]:
        """Mean and standard deviation (ddof 1; 0 for a single reward) of all rewards of ``source``."""
        count, mean, squares = self.moments[source]
        return mean, float(np.sqrt(squares / (count - 1))) if count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
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

    ``clip((clip(r, ±c_r) - mean) / (std + 1e-6), ±c_A)`` with mean and std of the group, the batch, all rewards so far of
    the data source (this batch included), or none. Equal rewards give exactly 0 under a group or batch mean.
    """
    reward = np.asarray(reward_N, dtype=np.float64)
    clipped = reward if options.reward_clip is None else np.clip(reward, -options.reward_clip, options.reward_clip)
    sources = np.asarray(["all"] * len(reward) if sources_N is None else sources_N)
    running = running if running is not None else RunningStatistics()
    if "running" in (options.advantage_mean, options.advantage_std):
        for source in np.unique(sources):
            running.update(str(source), clipped[sources == source])
    raw = (clipped - _means(options.advantage_mean, clipped, group_N, sources, running)) / _stds(
        options.advantage_std, clipped, group_N, sources, running
    )
    limit = options.advantage_clip
    advantage = raw if limit is None else np.clip(raw, -limit, limit)
    n = float(len(reward))
    return advantage, {
        "critic/advantages/mean": (float(advantage.sum()), n),
        "critic/advantages/abs_mean": (float(np.abs(advantage).sum()), n),
        "critic/advantages/clipfrac": (float((advantage != raw).sum()), n),
        "critic/rewards/clipfrac": (float((clipped != reward).sum()), n),
    }


def _means(
    kind: str, reward: FloatArray, group: IntArray, sources: Any, running: RunningStatistics
) -> FloatArray:
    if kind == "group":
        return _per_label(group, reward, _exact_mean)
    if kind == "batch":
        return np.full(len(reward), _exact_mean(reward)) if len(reward) else reward
    if kind == "running":
        return np.array([running.mean_std(str(s))[0] for s in sources])
    return np.zeros(len(reward))


def _stds(kind: str, reward: FloatArray, group: IntArray, sources: Any, running: RunningStatistics) -> FloatArray:
    if kind == "group":
        return _per_label(group, reward, _std) + EPS
    if kind == "batch":
        return np.full(len(reward), _std(reward) + EPS) if len(reward) else reward
    if kind == "running":
        return np.array([running.mean_std(str(s))[1] for s in sources]) + EPS
    return np.ones(len(reward))


def _per_label(labels: IntArray, values: FloatArray, of: Any) -> FloatArray:
    out = np.empty(len(values))
    for label in np.unique(labels):
        out[labels == label] = of(values[labels == label])
    return out


def _exact_mean(values: FloatArray) -> float:
    """The mean; of equal values exactly that value, which rounding of a sum need not give."""
    low, high = float(values.min()), float(values.max())
    return low if low == high else float(values.mean())


def _std(values: FloatArray) -> float:
    """Standard deviation with ddof 1; 0 for one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
