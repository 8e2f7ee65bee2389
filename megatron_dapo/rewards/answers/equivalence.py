"""Are two typed answers the same? Compared by type; symmetric, but for an equation that states a value.

Decisions: a unit on one side only is accepted, two must agree, nothing is converted; ``5%`` is 5 and 0.05, which are
not each other; a bare list is unordered, brackets ``( )`` are ordered; a set of one element is that element.
"""

from __future__ import annotations

from fractions import Fraction

from megatron_dapo.rewards.answers import symbolic
from megatron_dapo.rewards.answers.numbers import scaled
from megatron_dapo.rewards.answers.units import PERCENT
from megatron_dapo.rewards.answers.values import Answer

_MOST_UNORDERED = 12
"""Larger sets are compared by spelling alone: every pair of items may have to be compared."""


def equivalent(gold: Answer, found: Answer) -> bool:
    """True where ``found`` is the answer ``gold``.

    ``m + n = 5`` found is 5 where ``gold`` is no relation; the number found is never an equation that was asked for.
    """
    if found.stated is not None and gold.kind != "relation":
        return equivalent(gold, found.stated)
    return _same(gold, found)


def _same(a: Answer, b: Answer) -> bool:
    if a.kind == "number" and b.kind == "number":
        return _same_number(a, b)
    if not a.unit.agrees(b.unit):
        return False
    if "choice" in (a.kind, b.kind):
        return _same_choice(a, b)
    if "text" in (a.kind, b.kind):
        return a.kind == b.kind and a.text == b.text
    if "relation" in (a.kind, b.kind):
        return a.kind == b.kind and (a.text == b.text or symbolic.equal(a.text, b.text))
    if "union" in (a.kind, b.kind):
        return a.kind == b.kind and _same_variable(a, b) and _in_order(a, b)
    if "set" in (a.kind, b.kind):
        return _same_set(a, b) if a.kind == "set" else _same_set(b, a)
    if "tuple" in (a.kind, b.kind):
        return a.kind == b.kind and _same_tuple(a, b)
    return a.text == b.text or symbolic.equal(a.text, b.text)


def _same_number(a: Answer, b: Answer) -> bool:
    if not a.unit.agrees(b.unit):
        return False
    if a.text == b.text:
        return True
    if (a.unit == PERCENT) == (b.unit == PERCENT):
        return False
    percent, other = (a, b) if a.unit == PERCENT else (b, a)
    return scaled(percent.text, Fraction(1, 100)) == other.text


def _same_choice(a: Answer, b: Answer) -> bool:
    if a.kind != b.kind:
        choice, other = (a, b) if a.kind == "choice" else (b, a)
        return choice.name.partition("\n")[0] == other.text
    texts = [text for text in (a.name.partition("\n")[2], b.name.partition("\n")[2]) if text]
    return a.text == b.text and len(set(texts)) < 2


def _same_variable(a: Answer, b: Answer) -> bool:
    """``x < 3`` is not ``y < 3``; ``(-\\infty, 3)`` is both."""
    return not a.name or not b.name or a.name == b.name


def _in_order(a: Answer, b: Answer) -> bool:
    return len(a.items) == len(b.items) and all(_same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_tuple(a: Answer, b: Answer) -> bool:
    if a.brackets != b.brackets or not _same_variable(a, b):
        return False
    if _all_named(a) and _all_named(b):
        named = {item.name: item for item in b.items}
        return len(a.items) == len(named) and all(i.name in named and _same(i, named[i.name]) for i in a.items)
    return _in_order(a, b)


def _all_named(answer: Answer) -> bool:
    return bool(answer.items) and all(item.name for item in answer.items)


def _same_set(a: Answer, b: Answer) -> bool:
    """``a`` is a set. ``-5, 2`` also is ``x = -5, p = 2``, in this order."""
    if b.kind == "tuple":
        return _all_named(b) and b.brackets == "()" and _in_order(a, b)
    if b.kind != "set":
        return len(a.items) == 1 and _same(a.items[0], b)
    if len(a.items) != len(b.items):
        return False
    if len(a.items) > _MOST_UNORDERED:
        return a.text == b.text
    left = list(b.items)
    for item in a.items:
        partner = next((x for x in left if x.text == item.text and _same(item, x)), None) or next(
            (x for x in left if _same(item, x)), None
        )
        if partner is None:
            return False
        left.remove(partner)
    return True
