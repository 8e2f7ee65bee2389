"""Rewards: from the text of a response to a verdict. Importing this registers the built-in rewards."""

from megatron_dapo.rewards import gym as _gym  # noqa: F401
from megatron_dapo.rewards import math as _math  # noqa: F401
from megatron_dapo.rewards.math import check_answer, require_number
from megatron_dapo.rewards.pool import RewardPool
from megatron_dapo.rewards.registry import REWARDS, RewardResult, register_reward, reward_for

__all__ = [
    "RewardPool",
    "RewardResult",
    "check_answer",
    "register_reward",
    "require_number",
    "REWARDS",
    "reward_for",
]
