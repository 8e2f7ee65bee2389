"""A reward that costs nothing and tells responses apart: heads or tails by their text."""

from __future__ import annotations

import zlib
from typing import Any

from megatron_dapo.rewards import RewardResult


def flip(text: str) -> float:
    """+1 or -1, the same for the same text."""
    return 1.0 if zlib.crc32(text.encode()) & 1 else -1.0


def coin(response: str, answer: str, extra: dict[str, Any], options: Any) -> RewardResult:
    """``flip`` as a reward of ours."""
    return RewardResult.of(flip(response) > 0, response[-20:])
