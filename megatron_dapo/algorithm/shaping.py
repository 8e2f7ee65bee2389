"""From task scores to the rewards that are trained on (paper section 3.4)."""

from __future__ import annotations

import numpy as np

from megatron_dapo.config import RewardOptions
from megatron_dapo.types import BoolArray, FloatArray, IntArray, Sums


def soft_overlong_punishment(
    response_lengths_N: IntArray, max_response_len: int, buffer_len: int, factor: float = 1.0
) -> FloatArray:
    """Equation 13, to be added to the reward: float64 [N] in [-factor, 0].

    0 up to ``max_response_len - buffer_len`` tokens, then linear, -factor at the cap and beyond it. Lengths
    in tokens, int64 [N]. ``buffer_len`` 0 punishes nothing.
    """
    lengths = np.asarray(response_lengths_N, dtype=np.float64)
    if buffer_len == 0:
        return np.zeros(len(lengths))
    assert 0 < buffer_len <= max_response_len and factor >= 0, (buffer_len, max_response_len, factor)
    free = max_response_len - buffer_len
    return factor * np.clip((free - lengths) / buffer_len, -1.0, 0.0)


def shape_rewards(
    score_N: FloatArray, response_lengths_N: IntArray, options: RewardOptions, max_response_len: int
) -> tuple[FloatArray, Sums]:
    """Task scores [N] plus the soft overlong punishment, float64 [N]; how much that took."""
    buffer = options.overlong_buffer(max_response_len)
    punishment = soft_overlong_punishment(response_lengths_N, max_response_len, buffer, options.overlong_penalty_factor)
    n = float(len(punishment))
    report: Sums = {
        "reward/overlong_penalty": (float(punishment.sum()), n),
        "reward/overlong_share": (float((punishment < 0).sum()), n),
    }
    return np.asarray(score_N, dtype=np.float64) + punishment, report


def overlong_filter(truncated_N: BoolArray, options: RewardOptions) -> BoolArray:
    """Which samples stay in the loss and its denominator, bool [N]: all, or under overlong filtering those
    that ended by themselves. Group statistics see them all either way.
    """
    truncated = np.asarray(truncated_N, dtype=np.bool_)
    return ~truncated if options.overlong_filtering else np.ones_like(truncated)
