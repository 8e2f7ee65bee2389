"""Typed answers, and how tuples, sets and unions of intervals are put together in one spelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from megatron_dapo.rewards.answers.numbers import MOST_DIGITS
from megatron_dapo.rewards.answers.units import Unit

Kind = Literal["number", "tuple", "set", "union", "relation", "choice", "text", "expression"]
INFINITY = "\\infty"


@dataclass(frozen=True)
class Answer:
    """A typed answer. Equal answers of one kind have the same ``text``, as far as spelling goes.

    Example: ``parse("x = 5 cm")`` is ``Answer("number", "5", unit=Unit(frozenset({"cm"})), name="x")``
    """

    kind: Kind
    text: str
    unit: Unit = field(default_factory=Unit)
    name: str = ""
    """What the answer is said to be the value of: ``x`` of ``x = 5`` or ``x < 5``; the option's text of a choice."""
    items: tuple[Answer, ...] = ()
    brackets: str = ""
    stated: Answer | None = None
    """5 of ``m + n = 5``: the value, where a number is asked for."""


def make_tuple(items: list[Answer], brackets: str, name: str = "") -> Answer:
    """Ordered items; those that all have a name are spelled in the order of their names."""
    ordered = sorted(items, key=lambda i: i.name) if items and all(i.name for i in items) else items
    text = brackets[0] + ",".join(i.text for i in ordered) + brackets[1]
    return Answer("tuple", text, items=tuple(items), brackets=brackets, name=name)


def make_set(items: list[Answer], distinct: bool = False) -> Answer:
    """Items in any order; ``distinct``: each counts once."""
    by_text = {i.text: i for i in items}
    kept = list(by_text.values()) if distinct else items
    return Answer("set", "{" + ",".join(sorted(i.text for i in kept)) + "}" if kept else "∅", items=tuple(kept))


def make_intersection(intervals: list[Answer]) -> Answer | None:
    """The interval that is in all ``intervals``; None where there is none, or an end is no number."""
    low, high = Answer("expression", f"-{INFINITY}"), Answer("expression", INFINITY)
    opened, closed = "(", ")"
    for interval in intervals:
        if interval.kind != "tuple" or len(interval.items) != 2 or interval.name != intervals[0].name:
            return None
        ends = [_place(end) for end in (*interval.items, low, high)]
        if None in ends:
            return None
        first, last, lowest, highest = (end or 0 for end in ends)
        if first > lowest or (first == lowest and interval.brackets[0] == "("):
            low, opened = interval.items[0], interval.brackets[0]
        if last < highest or (last == highest and interval.brackets[1] == ")"):
            high, closed = interval.items[1], interval.brackets[1]
    if (_place(low) or 0) >= (_place(high) or 0):
        return None
    return make_tuple([low, high], opened + closed, name=intervals[0].name)


def make_complement(points: list[Answer]) -> Answer | None:
    """All numbers but ``points``; None where one is no number."""
    if not points or any(point.kind != "number" for point in points):
        return None
    inner = sorted({p.text: p for p in points}.values(), key=lambda p: _place(p) or 0)
    ends = [Answer("expression", f"-{INFINITY}"), *inner, Answer("expression", INFINITY)]
    return make_union([make_tuple(list(pair), "()") for pair in pairwise(ends)])


def make_union(members: list[Answer]) -> Answer:
    """Intervals and points in order; those that touch are joined, where all ends are numbers."""
    spans: list[tuple[Answer, Answer, str]] = []
    for member in members:
        for part in member.items if member.kind == "union" else [member]:
            if part.kind == "tuple" and len(part.items) == 2:
                spans.append((part.items[0], part.items[1], part.brackets))
            else:
                spans += [(point, point, "[]") for point in part.items]
    names = {m.name for m in members if m.name}
    name = names.pop() if len(names) == 1 else ""
    places = [(_place(low), _place(high)) for low, high, _ in spans]
    if all(low is not None and high is not None for low, high in places):
        spans = list(_joined(spans))
    parts = [make_tuple([low, high], brackets) for low, high, brackets in spans]
    if len(parts) == 1:
        return replace(parts[0], name=name)
    if all(p.brackets == "[]" and p.items[0] == p.items[1] for p in parts):
        return make_set([p.items[0] for p in parts])
    return Answer("union", "∪".join(p.text for p in parts), items=tuple(parts), name=name)


def _joined(spans: list[tuple[Answer, Answer, str]]) -> Iterator[tuple[Answer, Answer, str]]:
    ordered = sorted(spans, key=lambda s: (_place(s[0]), s[2][0] == "("))
    low, high, brackets = ordered[0]
    for next_low, next_high, next_brackets in ordered[1:]:
        end, start = _place(high) or 0, _place(next_low) or 0
        if start < end or (start == end and (brackets[1] == "]" or next_brackets[0] == "[")):
            if (_place(next_high) or 0, next_brackets[1] == "]") > (end, brackets[1] == "]"):
                high, brackets = next_high, brackets[0] + next_brackets[1]
            continue
        yield low, high, brackets
        low, high, brackets = next_low, next_high, next_brackets
    yield low, high, brackets


def _place(end: Answer) -> Fraction | float | None:
    """Where an interval's end is on the line of numbers; None where it is no number."""
    if end.kind == "number" and len(end.text) <= MOST_DIGITS:
        return Fraction(end.text)
    return {INFINITY: float("inf"), f"-{INFINITY}": float("-inf")}.get(end.text)
