"""Equations, inequalities and memberships: what they say about the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from megatron_dapo.rewards.answers import symbolic
from megatron_dapo.rewards.answers.notation import pieces, symbols
from megatron_dapo.rewards.answers.numbers import arithmetic
from megatron_dapo.rewards.answers.units import END_WORDS, WORDS
from megatron_dapo.rewards.answers.values import INFINITY, Answer, make_tuple

Parse = Callable[[str], Answer]

_ASCENDING, _DESCENDING = "<≤", ">≥"
_MIRROR = str.maketrans(">≥", "<≤")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_OPERATOR = re.compile(r"[-+*/^]|\\(?:frac|cdot|times|div|sqrt|pm)(?![a-zA-Z])")
_GREEK_OR_LETTER = r"(?:[A-Za-z]|\\[a-zA-Z]+)(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?"
_VARIABLE = re.compile(rf"{_GREEK_OR_LETTER}'?(?: ?\({_GREEK_OR_LETTER}\))?")
_NO_VARIABLE = re.compile(r"\\(?:pi|infty|frac|sqrt|cdot|times|ln|log|sin|cos|tan)(?![a-zA-Z])")


def read_relation(text: str, parse: Parse) -> Answer | None:
    """What a chain of ``=``, ``<``, ``≈``, ``∈`` ... says; None where ``text`` is no such chain."""
    parts = pieces(text.replace(":=", "=").replace("==", "="), "=<>≤≥≠≈∈")
    sides, signs = [p.strip() for p, _ in parts], "".join(s for _, s in parts)
    if not signs or not all(sides[1:]):
        return None
    if not sides[0]:
        return parse(sides[1]) if signs in ("=", "≈") else None
    if "≈" in signs:
        return _about(sides, signs, parse)
    if set(signs) == {"="}:
        return _equation(sides, parse)
    if signs == "∈" and _is_name(sides[0]):
        return _named(parse(sides[1]), sides[0])
    if not signs.strip(_ASCENDING):
        return _inequality(sides, signs, parse)
    if not signs.strip(_DESCENDING):
        return _inequality(sides[::-1], signs[::-1].translate(_MIRROR), parse)
    return _whole(sides, signs)


def is_false(answer: Answer) -> bool:
    """True for an equation between numbers that does not hold (``3=7``)."""
    return (
        answer.kind == "relation" and "=" in answer.text and not re.search(r"[a-zA-Z]", _COMMAND.sub("", answer.text))
    )


def _about(sides: list[str], signs: str, parse: Parse) -> Answer:
    """``\\sqrt{2} ≈ 1.41`` is exact on its left; ``x ≈ 11`` is not."""
    first = signs.index("≈")
    if first == 0 and _is_name(sides[0]):
        return replace(parse(sides[1]), name=symbols(sides[0]))
    left = sides[0] + "".join(sign + side for sign, side in zip(signs[:first], sides[1 : first + 1], strict=True))
    return parse(left)


def _equation(sides: list[str], parse: Parse) -> Answer:
    if len(sides) == 2 and _is_name(sides[1]) and arithmetic(sides[0]):
        sides = sides[::-1]  # 5 = x
    *before, last = sides
    value = parse(last)
    if not all(_holds(side, last, value) for side in before):
        return _whole(sides, "=" * len(before))
    left = before[0]
    if _is_number(left) or _is_name(left):
        return _assigned(value, left, parse)
    if re.search(r"[0-9]", _without_details(left)) or left.startswith("-"):
        return _whole(sides, "=" * len(before))
    return replace(_whole(sides, "=" * len(before)), stated=value)


def _assigned(value: Answer, name: str, parse: Parse) -> Answer:
    """``value`` with the name it was given; a tuple of names names the items."""
    if value.kind == "tuple" and name[:1] == "(" and name[-1:] == ")":
        names = [symbols(n) for n, _ in pieces(name[1:-1], ",")]
        if len(names) == len(value.items):
            named = [replace(item, name=n) for item, n in zip(value.items, names, strict=True)]
            return make_tuple(named, value.brackets)
    if value.kind in ("number", "expression", "text") and not _is_number(name):
        return replace(value, name=symbols(name))
    return value


def _named(value: Answer, name: str) -> Answer:
    return replace(value, name=symbols(name)) if value.kind in ("tuple", "union") else value


def _is_number(side: str) -> bool:
    """True for what holds numbers and no variable, such as ``3 + 4`` and ``\\sqrt{16}``."""
    return bool(re.search(r"[0-9]", side)) and not re.search(r"[a-zA-Z]", _COMMAND.sub("", _plain_money(side)))


def _plain_money(side: str) -> str:
    return side.replace("¤", "").replace(" percent", "").replace(" degree", "")


def _holds(side: str, last: str, value: Answer) -> bool:
    """False for ``3`` of ``3 = 7``: a side without variables has to have the value that is stated."""
    if not _is_number(side) or value.kind != "number":
        return True
    number = arithmetic(_plain_money(side))
    if number is None:
        return symbolic.equal(symbols(_plain_money(side)), value.text)
    return number == value.text


def _without_details(side: str) -> str:
    """A side without subscripts and arguments, which may hold digits: ``x_1``, ``f(2)``."""
    side = re.sub(r"_ ?(?:\{[^{}]*\}|[A-Za-z0-9])", "", side)
    return re.sub(r"\([^()]*\)|\{[^{}]*\}", "", side) if not re.search(r"\\frac|\^", side) else side


def _is_name(side: str) -> bool:
    """True for ``x``, ``f(2)``, ``\\angle ABC``, ``(x, y)`` and for prose."""
    if WORDS in side or re.search(r"(?<![A-Za-z\\])[A-Za-z]{4}", side):
        return True
    bare = _without_details(side)
    return not re.search(r"[0-9]", bare) and not _OPERATOR.search(bare)


def _inequality(sides: list[str], signs: str, parse: Parse) -> Answer:
    """``a < x ≤ b`` as an interval of ``x`` where its ends are constants; else the chain itself."""
    if len(sides) == 3 and _is_variable(sides[1]):
        low, name, high = parse(sides[0]), sides[1], parse(sides[2])
    elif len(sides) == 2 and _is_variable(sides[0]):
        low, name, high = Answer("expression", f"-{INFINITY}"), sides[0], parse(sides[1])
    elif len(sides) == 2 and _is_variable(sides[1]):
        low, name, high = parse(sides[0]), sides[1], Answer("expression", INFINITY)
    else:
        return _whole(sides, signs)
    if not all(_is_constant(end) for end in (low, high)):
        return _whole(sides, signs)
    opened = "[" if signs[0] == "≤" and low.text != f"-{INFINITY}" else "("
    closed = "]" if signs[-1] == "≤" and high.text != INFINITY else ")"
    return make_tuple([low, high], opened + closed, name=symbols(name))


def _is_variable(side: str) -> bool:
    return bool(_VARIABLE.fullmatch(side)) and not _NO_VARIABLE.match(side) and side != "e"


def _is_constant(end: Answer) -> bool:
    if end.kind == "number":
        return True
    letters = _COMMAND.sub("", end.text) if not re.search(r"\\", _NO_VARIABLE.sub("", end.text)) else "x"
    return end.kind == "expression" and not re.search(r"[a-df-zA-Z]", letters)


def _whole(sides: list[str], signs: str) -> Answer:
    text = symbols(sides[0]) + "".join(sign + symbols(side) for sign, side in zip(signs, sides[1:], strict=True))
    return Answer("relation", text.replace(WORDS, "").replace(END_WORDS, ""))
