"""Rule-based verifier for mathematics: does a response end in the right answer? (paper section 2.4, eq. 7)

``strict`` (default) takes the last answer that the response states (``answers.extraction``: an ``Answer:`` line, else
a box, else the habit of GSM8K-trained models; after the last ``</think>``), reads it and the row's answer as typed
values (``answers.parse``) and compares them by type (``answers.equivalence``).

``verl_compat`` applies the rules of the released recipe, misjudgements included (``released``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import released
from megatron_dapo.rewards.answers import symbolic
from megatron_dapo.rewards.answers.equivalence import equivalent
from megatron_dapo.rewards.answers.extraction import extract_answer, text_after_answer_marker
from megatron_dapo.rewards.answers.gold import check_answer, require_number
from megatron_dapo.rewards.answers.parse import parse
from megatron_dapo.rewards.answers.values import Answer
from megatron_dapo.rewards.registry import RewardResult, as_utf8, register_reward

__all__ = [
    "LONGEST_PREDICTION",
    "canonical",
    "check_answer",
    "equal_answers",
    "extract_answer",
    "math_reward",
    "require_number",
    "text_after_answer_marker",
]

LONGEST_PREDICTION = 256
"""Characters of a prediction that are kept for logs and majority votes."""

_gold = lru_cache(maxsize=256)(parse)


@register_reward("math", prepare=symbolic.check_installed)
def math_reward(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """+1 and acc 1 where the response's answer equals ``answer``, else -1 and 0 (none: ``no_answer``)."""
    if options.verifier_mode == "strict":
        return _strict(response, answer)
    found = released.extract(response)
    if found is None:
        return RewardResult.unscored("no_answer")
    prediction = released.normalise(found)
    return RewardResult.of(prediction == released.normalise(answer), _as_text(prediction))


def _strict(response: str, answer: str) -> RewardResult:
    """Right answers are all spelled as the row's, so that they vote together; a wrong one never is."""
    found = extract_answer(response)
    if found is None:
        return RewardResult.unscored("no_answer")
    gold, given = _gold(answer), parse(found)
    wanted, prediction = spelling(gold), spelling(given)
    if equivalent(gold, given):
        return RewardResult.of(True, _as_text(wanted))
    if prediction == wanted:
        prediction = f"{given.text} {given.unit or given.name or given.kind}".strip()
    return RewardResult.of(False, _as_text(prediction))


def spelling(answer: Answer) -> str:
    """How a typed answer is written in logs and majority votes: without its unit."""
    return (answer.stated or answer).text


def canonical(answer: str) -> str:
    """One spelling for all spellings of an answer: equal answers have the same, as far as spelling goes.

    Example: ``canonical("x = $1{,}234.50$ dollars.") == canonical("2469/2") == "2469/2"``
    """
    return spelling(parse(answer))


def equal_answers(gold: str, found: str) -> bool:
    """True where ``found`` is the answer ``gold``. Example: ``equal_answers("(0, 1)", "0 < x < 1")``"""
    return equivalent(parse(gold), parse(found))


def _as_text(prediction: str) -> str:
    return as_utf8(prediction[:LONGEST_PREDICTION])
