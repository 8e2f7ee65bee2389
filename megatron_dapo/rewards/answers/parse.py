"""From an answer's text to a typed answer.

============  =======================================================================================
number        exact, with or without a unit: ``\\frac12``, ``1{,}234``, ``5 cm``, ``25\\%``, ``x = 5``
tuple         ordered, with its brackets, so that a pair and an interval are one: ``(1, 2)``, ``[0, 1)``,
              ``0 \\le x < 1``, ``x = 1, y = 2``
set           unordered: ``\\{1, 2\\}``, ``1, 2``, ``1 or 2``, ``\\pm 1``
union         of intervals and sets: ``(0, 1) \\cup (2, 3)``, ``x < 0 or x > 1``
relation      an equation or inequality that is the answer as a whole: ``2x + z = 1``
choice        ``E``, ``(e)``, ``E: a score``, ``Option E``
text          words
expression    all else
============  =======================================================================================
"""

from __future__ import annotations

import re
from dataclasses import replace

from megatron_dapo.rewards.answers.notation import CLOSERS, LONGEST_STRUCTURE, OPENERS, pieces, plain, symbols
from megatron_dapo.rewards.answers.numbers import LEADING_NUMBER, MOST_DIGITS, exact, scaled
from megatron_dapo.rewards.answers.relations import read_relation
from megatron_dapo.rewards.answers.units import END_WORDS, WORDS, Unit, read_unit, scale
from megatron_dapo.rewards.answers.values import (
    INFINITY,
    Answer,
    make_complement,
    make_intersection,
    make_set,
    make_tuple,
    make_union,
)

_DEEPEST = 6
_MOST_ITEMS = 100


def parse(answer: str) -> Answer:
    """Read ``answer``; every text is at least an ``expression``."""
    bare = answer.strip()
    bare = bare[1:-1] if bare[:1] == bare[-1:] == "$" else bare
    if number := exact(bare):  # nearly all answers in training
        return Answer("number", number)
    text = plain(answer)
    if len(text) > LONGEST_STRUCTURE:
        number = exact(text)
        return Answer("number", number) if number else Answer("expression", "".join(text.split()))
    return _parse(text, 0)


def _parse(text: str, depth: int) -> Answer:
    text = text.strip().rstrip(".;,: ") if not text.endswith("\\") else text.strip()
    if number := read_number(text):
        return number
    if depth > _DEEPEST:
        return _leaf(text)
    for reader in (_choice, _list, _relation, _bracketed, _with_unit):
        if (answer := reader(text, depth)) is not None:
            return answer
    return _leaf(text)


# --- numbers ------------------------------------------------------------------------------------------------


def read_number(text: str) -> Answer | None:
    """``text`` as one number with or without a unit."""
    bare = text.replace(WORDS, " ").replace(END_WORDS, " ").strip() if WORDS in text else text
    if whole := exact(bare):
        return Answer("number", whole)
    if bare[:1] == "¤" or bare[:2] == "-¤":
        negative, amount = bare[0] == "-", bare.lstrip("-¤ ")
        found = read_number(amount)
        if found and not found.unit.known:
            value = f"-{found.text}".replace("--", "") if negative else found.text
            return replace(found, text=value, unit=Unit(frozenset({"dollar"}), found.unit.words))
        return None
    text = text.lstrip(f"{WORDS} ")
    leading = LEADING_NUMBER.match(text)
    if leading is None or len(text) > MOST_DIGITS:
        return None
    number = exact(leading[0].strip().rstrip(","))
    if number is None:
        return None
    factor, rest = scale(text[leading.end() :])
    if not _apart(leading[0], rest):
        return None
    unit = read_unit(rest)
    if unit is None:
        return None
    product = number if factor == 1 else scaled(number, factor)
    return Answer("number", product, unit) if product else None


def _apart(number: str, rest: str) -> bool:
    """False for ``2ab``: words that touch the number may be variables (``5cm`` is known, and no word)."""
    return not rest[:1].isalpha() or bool((unit := read_unit(rest, after_number=False)) and unit.known)


def _with_unit(text: str, depth: int) -> Answer | None:
    """An expression with a unit behind it: ``2\\pi \\text{ cm}``."""
    starts = [m.start() for m in re.finditer(rf" ?(?:{WORDS}| (?=[a-zA-Z]{{2}}))", text)][:20]
    for start in starts:
        body = text[:start].strip()
        if body and not body[-1].isalpha() or re.search(r"\\[a-zA-Z]+$", body):
            unit = read_unit(text[start:], after_number=False)
            if unit and not re.search(r"[a-zA-Z]{4}|[=<>]", re.sub(r"\\[a-zA-Z]+", "", body)):
                return replace(_parse(body, depth + 1), unit=unit)
    return None


# --- choices ------------------------------------------------------------------------------------------------

_MARKS = rf"[{WORDS}{END_WORDS} ]*"
_CHOICE = re.compile(
    rf"{_MARKS}(?:(?i:option|choice|answer|alternative)s?{_MARKS} )?{_MARKS}"
    rf"(?:\({_MARKS}([A-Za-z]){_MARKS}\){_MARKS}[:.]?|([A-Z]){_MARKS}(?:[:.)]| - (?=[A-Za-z ]{{4}})|$)"
    rf"|([a-z])\)(?=.)){_MARKS}(.*)",
    re.DOTALL,
)
_OPTION = re.compile(rf"{_MARKS}(?i:option|choice|alternative){_MARKS} \(?([A-Za-z])\)?[:.]?(?: (.*)|$)", re.DOTALL)

_SEVERAL_CHOICES = re.compile(
    r"\([a-zA-Z]\)|^[-+*/^_=<>≤≥!]|^\W*(?:or|and)\b|\b(?:or|and) \(?[A-Z]\)?(?![A-Za-z])|\b[A-Z][:)]"
)


def _choice(text: str, depth: int) -> Answer | None:
    found = _OPTION.fullmatch(text)
    letter, rest = (found[1], found[2] or "") if found else ("", "")
    if not found and (found := _CHOICE.fullmatch(text)):
        letter, rest = found[1] or found[2] or found[3], found[4]
        if rest and (not text[found.start(4) - 1].isspace() and text[found.start(4) - 1] not in WORDS + END_WORDS):
            return None
    if not found or _SEVERAL_CHOICES.search(rest):
        return None
    return Answer("choice", letter.upper(), name=letter + "\n" + (_words(rest) if rest.strip() else ""))


# --- lists, sets, tuples, intervals -------------------------------------------------------------------------


def split_list(text: str, bracketed: bool = False) -> list[tuple[str, str]]:
    """The items of a list, each with the separator behind it; a comma within a number is none.

    ``1,000, 2`` has two items: where some commas are followed by a space, the others between three digits are part
    of a number. ``1,234`` in brackets has two; ``1,000`` is never more than one.
    """
    found = pieces(text, ",;")
    commas = [i for i, (_, s) in enumerate(found) if s == ","]
    spaced = any(found[i + 1][0][:1].isspace() for i in commas) or any(s not in (",", "") for _, s in found)
    joined: list[tuple[str, str]] = []
    for piece, separator in found:
        groups = re.match(r"[0-9]{3}(?![0-9])", piece)
        if (
            groups
            and joined
            and joined[-1][1] == ","
            and re.search(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})*$", joined[-1][0])
            and (spaced or piece[0] == "0" or not bracketed)
        ):
            joined[-1] = (f"{joined[-1][0]},{piece}", separator)
            continue
        joined.append((piece, separator))
    return [(p, s) for p, s in joined if p.strip(f" {WORDS}{END_WORDS}")]


def _list(text: str, depth: int) -> Answer | None:
    """``1, 2``, ``1 and 2``, ``x = 1 or x = 2``, ``\\pm 1``; None where there is one item only."""
    parts = split_list(text)
    if len(parts) > _MOST_ITEMS:
        return None
    if len(parts) < 2:
        if "±" not in text or text.count("±") > 1 or pieces(text, "=<>≤≥≠")[1:]:
            return None
        before, after = text.split("±")
        if before.count("(") != before.count(")") or before.count("{") != before.count("}"):
            return None
        parts = [(f"{before}+{after}" if before.strip() else after, ""), (f"{before}-{after}", "")]
    items = _items(parts, depth)
    separators = [s for _, s in parts]
    if all(i.kind in ("tuple", "union") and i.name for i in items):
        both = None if "or" in separators else make_intersection(items)  # x > 0 and x < 1
        return both or make_union(items)  # x < 0 or x > 1; also with "and" where both cannot be
    if "or" not in separators and all(i.name and i.kind != "choice" for i in items):
        names = [i.name for i in items]
        if len(set(names)) == len(names):
            return make_tuple(items, "()")
    return make_set(items)


def _items(parts: list[tuple[str, str]], depth: int) -> list[Answer]:
    """The parts of a list, read; ``1 \\pm x`` is two of them."""
    found: list[Answer] = []
    for part, _ in parts:
        item = _parse(part, depth + 1)
        found += item.items if item.kind == "set" and "±" in part else [item]
    return found


_DESCRIBED = re.compile(
    r"\\\{ ?[a-zA-Z](?: ?∈ ?\\mathbb ?\{? ?R ?\}?)? ?(?::|\||\\mid|\\vert) ?([^:|]*[<>≤≥∈][^:|]*)\\\}"
)
"""``\\{x : x > 0\\}``."""
_WITHOUT = re.compile(r"\\mathbb ?\{? ?R ?\}? ?(?:\\setminus|\\backslash|\\|-) ?\\\{([^{}]*)\\\}")
"""``\\mathbb{R} \\setminus \\{0\\}``."""


def _bracketed(text: str, depth: int) -> Answer | None:
    if text in ("∅", "\\{\\}", "\\{ \\}"):
        return Answer("set", "∅")
    if "∪" in text or re.search(r"[\])}] ?U ?[\[(\\]", text):
        spans = [p for p, _ in pieces(re.sub(r"([\])}]) ?U ?(?=[\[(\\])", r"\1∪", text), "∪")]
        members = [_parse(p, depth + 1) for p in spans]
        if 1 < len(members) <= _MOST_ITEMS and all(m.kind in ("tuple", "set", "union") for m in members):
            return make_union(members)
        return None
    if re.fullmatch(r"\\mathbb ?\{? ?R ?\}?|\(-\\infty ?, ?\+?\\infty ?\)", text):
        ends = [Answer("expression", "-" + INFINITY), Answer("expression", INFINITY)]
        return make_tuple(ends, "()")
    if described := _DESCRIBED.fullmatch(text):
        values = _parse(described[1], depth + 1)
        return values if values.kind in ("tuple", "union", "set") and values.name else None
    if without := _WITHOUT.fullmatch(text):
        return make_complement(_items(split_list(without[1], bracketed=True), depth))
    opened = 2 if text[:2] == "\\{" else 1 if text[:1] in tuple(OPENERS) else 0
    closed = 2 if text[-2:] == "\\}" else 1 if text[-1:] in tuple(CLOSERS) else 0
    if not opened or not closed or _closes_early(text):
        return None
    inner = text[opened : len(text) - closed]
    brackets = text[opened - 1] + text[-1]
    parts = split_list(inner, bracketed=True)
    if len(parts) > _MOST_ITEMS:
        return None
    items = _items(parts, depth) if len(parts) > 1 else []
    if brackets == "{}":
        alone = _parse(inner, depth + 1) if len(parts) == 1 else None
        if alone and (opened == 1 or alone.kind == "set"):  # {5}; \{\pm 1\}
            return replace(alone, items=alone.items)
        return make_set([alone] if alone else items, distinct=True) if alone is None or _is_member(inner) else None
    if len(parts) > 1 and (len(parts) == 2 or brackets in ("()", "[]")):
        return make_tuple(items, brackets)
    return _parse(inner, depth + 1) if brackets == "()" and len(parts) == 1 else None


def _is_member(text: str) -> bool:
    """False for ``x : x > 0`` and ``x | x > 0``, which describe a set."""
    return not re.search(r"[:|∈]|\\mid", text)


def _closes_early(text: str) -> bool:
    """True for ``(a)(b)``: the first bracket is not the partner of the last."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in OPENERS) - (char in CLOSERS)
        if depth <= 0 and at < len(text) - 1 and char in CLOSERS:
            return True
    return depth != 0


def _relation(text: str, depth: int) -> Answer | None:
    return read_relation(text, lambda part: _parse(part, depth + 1))


# --- words and symbols --------------------------------------------------------------------------------------

_LETTERS = re.compile(r"[A-Za-z]+")
_SHORT_WORDS = frozenset(["no", "yes", "odd", "even"])
_NAMES_OF_FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan cot sec csc log exp max min gcd lcm mod det lim inf sup arg")
)
_INFINITE = re.compile(r"([-+]?) ?(?:\\infty|infinity|inf|positive infinity)", re.IGNORECASE)


def _leaf(text: str) -> Answer:
    bare = " ".join(text.replace(WORDS, " ").replace(END_WORDS, " ").split())
    if infinite := _INFINITE.fullmatch(bare):
        return Answer("expression", infinite[1].strip("+") + INFINITY)
    if bare != text and re.fullmatch(r"[^\\=<>]*", bare) and (number := exact(bare)):
        return Answer("number", number)
    words = _LETTERS.findall(bare)
    marked = WORDS in text
    is_text = not re.search(r"[0-9\\=<>≤≥≠+*/^_{}|]", bare) and any(
        (len(w) > (1 if marked else 2) or w.lower() in _SHORT_WORDS) and w.lower() not in _NAMES_OF_FUNCTIONS
        for w in words
    )
    return Answer("text", _words(bare)) if is_text else Answer("expression", symbols(bare))


def _words(text: str) -> str:
    """Words without case, articles and punctuation."""
    text = text.replace(WORDS, " ").replace(END_WORDS, " ").casefold()
    words = re.sub(r"[.,;:!?\"'-]", " ", text).split()
    return " ".join(w for w in words if w not in ("the", "a", "an")) or text.strip()
