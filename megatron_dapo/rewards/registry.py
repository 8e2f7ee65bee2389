"""Reward functions by name.

A reward is one function ``(response, answer, extra, options) -> RewardResult``. It sees the text of one
response, never the prompt, and runs in a worker process of ``rewards.pool``: it must be importable there and
keep no state.
"""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from megatron_dapo.config import RewardOptions
from megatron_dapo.plugins import Registry
from megatron_dapo.types import InputError, Prompt, RewardStatus

LARGEST_SCORE = 1e30
"""Scores beyond it are refused: mean and variance of a batch would no longer be finite in every precision used."""
LONGEST_FAULT = 8000
"""Characters of a traceback that are kept: its end, which names the exception."""


@dataclass(frozen=True)
class RewardResult:
    """Verdict on one response: ``score`` (+1 or -1, eq. 7) feeds the advantage, ``acc`` in [0, 1] the filter.
    ``fault`` says, where there is none, what went wrong: the traceback of what the reward raised.

    Example: ``RewardResult(score=1.0, acc=1.0, prediction="34", status="ok")``
    """

    score: float
    acc: float
    prediction: str
    status: RewardStatus
    fault: str = field(default="", compare=False)

    @classmethod
    def of(cls, correct: bool, prediction: str) -> RewardResult:
        """The paper's rule reward: +1 for a right answer, -1 for a wrong one."""
        return cls(1.0 if correct else -1.0, float(correct), prediction, "ok")

    @classmethod
    def unscored(cls, status: RewardStatus, prediction: str = "", fault: str = "") -> RewardResult:
        """A response that got no verdict: counts as -1, but its status tells it from a wrong answer."""
        return cls(-1.0, 0.0, prediction, status, fault)

    @classmethod
    def raised(cls, error: BaseException) -> RewardResult:
        """A verifier that tripped over a response: status ``error``, the traceback in ``fault``."""
        said = "".join(traceback.format_exception_only(error)).strip()
        return cls.unscored("error", said[:200], "".join(traceback.format_exception(error))[-LONGEST_FAULT:])


class NotAVerdict(InputError):
    """A reward returned something that is no ``RewardResult``, or one with impossible values."""


RewardFunction = Callable[[str, str, dict[str, Any], RewardOptions], RewardResult]

REWARDS = Registry[RewardFunction]("--reward", "reward")
_PREPARE: dict[str, Callable[[], None]] = {}


def register_reward(name: str, prepare: Callable[[], None] | None = None) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward known as ``name``.

    ``prepare`` runs once per worker before its first sample, outside the sample's time limit: the place of slow
    imports.
    """

    def add(function: RewardFunction) -> RewardFunction:
        REWARDS.register(name)(function)
        if prepare is not None:
            _PREPARE[name] = prepare
        return function

    return add


def module_of(name: str) -> str:
    """The module to import to have the reward ``name`` in another process. Raises: as ``REWARDS``."""
    function = REWARDS[name]
    return name.partition(":")[0] if ":" in name else function.__module__


def prepare_reward(name: str) -> None:
    """Run what the reward wants done once per process before its first sample."""
    _PREPARE.get(name, lambda: None)()


def reward_for(prompt: Prompt, options: RewardOptions) -> str:
    """Name of the reward that judges responses to ``prompt``."""
    return reward_of(prompt.data_source, options)


def reward_of(data_source: str, options: RewardOptions) -> str:
    """Name of the reward for the rows of a data source.

    ``options.reward`` if it is not ``auto``; else the data source where a reward is registered under it; else
    ``reasoning_gym`` for ``reasoning_gym/<task>``; else ``math``.
    """
    if options.reward != "auto":
        return options.reward
    if data_source in REWARDS:
        return data_source
    return "reasoning_gym" if data_source.startswith("reasoning_gym/") else "math"


_SHORT = reprlib.Repr(maxstring=80, maxother=160)


def judge(name: str, response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Call the reward ``name`` on one response; what it raises becomes status ``error``, with the traceback in ``fault``.

    Raises: ``InputError``, the reward's own; ``NotAVerdict`` for a result that is none.
    """
    reward = REWARDS[name]
    try:
        result = reward(response, answer, extra, options)
    except InputError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # a verifier that trips over a response must not end the run: it is counted
        return RewardResult.raised(error)
    return _verdict(name, result)


def _verdict(name: str, result: Any) -> RewardResult:
    """``result`` with plain Python's numbers. Raises: ``NotAVerdict`` where it is no verdict."""
    shown = " ".join(_SHORT.repr(result).split())
    if not isinstance(result, RewardResult):
        raise NotAVerdict(f"--reward {name}: it returned {type(result).__name__} ({shown}); return a RewardResult")
    known, (status, prediction) = get_args(RewardStatus), _fields(result, "status", "prediction")
    if not isinstance(status, str) or status not in known or not isinstance(prediction, str):
        raise NotAVerdict(f"--reward {name}: it returned {shown}; status is one of {known}, prediction a str")
    score, acc = map(_number, _fields(result, "score", "acc"))
    if not abs(score) <= LARGEST_SCORE or not 0.0 <= acc <= 1.0:
        raise NotAVerdict(
            f"--reward {name}: it returned {shown}; score must be a finite number and acc one within [0, 1]"
        )
    fault = result.fault if isinstance(result.fault, str) else ""
    return RewardResult(score, acc, as_utf8(prediction), result.status, as_utf8(fault[-LONGEST_FAULT:]))


def as_utf8(text: str) -> str:
    """``text`` with ``?`` for halves of surrogate pairs, which no report could be written with."""
    return text.encode("utf-8", "replace").decode()


def _fields(result: RewardResult, *names: str) -> list[Any]:
    """Fields, None where one is missing: a subclass may have its own way of making itself."""
    return [getattr(result, name, None) for name in names]


def _number(value: Any) -> float:
    """``value`` as a float where it is a number (NumPy's and torch's are), else NaN."""
    if not hasattr(type(value), "__float__"):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
