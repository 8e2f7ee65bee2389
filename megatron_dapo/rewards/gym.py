"""reasoning-gym's procedural tasks: every task brings its own scorer.

A row's ``extra`` holds ``{"task": name, "entry": {"question": ..., "answer": ..., "metadata": {...}}}``.
Scores between 0 and 1 are no partial credit here: some scorers give 0.01 for no answer at all, so only
exactly 1.0 is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megatron_dapo.config import RewardOptions
from megatron_dapo.plugins import nearest
from megatron_dapo.rewards.math import text_after_answer_marker
from megatron_dapo.rewards.registry import RewardResult, register_reward
from megatron_dapo.types import InputError

Scorer = Callable[[str, dict[str, Any]], float]


@cache
def _datasets() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise InputError("rows of reasoning_gym tasks need its scorers: pip install reasoning-gym") from error
    known: dict[str, Any] = DATASETS
    return known


@cache
def _scorer(task: str) -> Scorer:
    """The scorer of ``task`` under its default configuration, built once per process."""
    known = _datasets()
    if task not in known:
        near = nearest(task, known)
        raise InputError(f"extra.task {task!r}: reasoning_gym has no such task; did you mean {near!r}?")
    dataset, config = known[task]
    scorer: Scorer = dataset(config=config()).score_answer
    return scorer


def _prepare() -> None:
    _datasets()


@register_reward("reasoning_gym", prepare=_prepare)
def gym_reward(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Let the task's own scorer judge the text after the last ``Answer:`` (without one: the whole response).

    A scorer that raises gives status ``error``.
    Raises: ``InputError`` where the row lacks its task or entry, or reasoning-gym is not installed.
    """
    if not isinstance(extra.get("task"), str) or not isinstance(extra.get("entry"), dict):
        raise InputError("a reasoning_gym row needs extra.task (a name) and extra.entry (the generated item)")
    scorer = _scorer(extra["task"])
    prediction = text_after_answer_marker(response)
    if not prediction:
        return RewardResult.unscored("no_answer")
    try:
        score = scorer(prediction, extra["entry"])
    except Exception as error:  # scorers parse free text, and some raise on garbage
        return RewardResult.raised(error)
    return RewardResult.of(score == 1.0, prediction)
