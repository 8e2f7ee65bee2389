"""Units: what may stand behind a number, in one spelling, and which of them agree.

A unit on one side only is accepted. On both sides they must agree: units that are known (``cm^2``, ``hour``) must be
the same, without conversion (60 minutes are not 1 hour); of other words (``13 red apples``) one side may say less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

WORDS, END_WORDS = "\x02", "\x03"
"""Stand around what LaTeX marks as text."""


@dataclass(frozen=True)
class Unit:
    """Example: ``5 cm^2 of paper`` has ``Unit(frozenset({"cm^2"}), frozenset({"paper"}))``."""

    known: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.known or self.words)

    def __str__(self) -> str:
        return " ".join([*sorted(self.known), *sorted(self.words)])

    def agrees(self, other: Unit) -> bool:
        """True where both may stand behind the same number."""
        if not self or not other:
            return True
        if self.known or other.known:
            return self.known == other.known
        return self.words <= other.words or other.words <= self.words


PERCENT = Unit(frozenset({"percent"}))
_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; inch inches; foot feet ft;
yard yd yards; mile mi; gram g grams gm; kg kilogram kilo; mg milligram; pound lb lbs; ounce oz; ton tonne; liter litre
liters; ml milliliter millilitre; gallon gal; quart; pint; second sec s secs; minute min mins; hour hr h hrs; day; week;
month; year yr yrs; cent; dollar buck usd; euro eur; yen; rupee; yuan; degree deg; radian rad; percent pct; mph; kph;
newton; joule; watt; volt; celsius; fahrenheit; kelvin; am; pm; hertz hz; rpm; acre; hectare; bit; byte; dozen
"""
_ALIASES: dict[str, str] = {
    form: line.split()[0] for line in _SPELLINGS.split(";") for word in line.split() for form in (word, word + "s")
}
_SINGLE = frozenset(["m", "g", "s", "h"])
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour"}
SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_NO_UNIT = frozenset(
    re.findall(
        r"\w+",
        """or and to not no half plus minus over than least most about approximately if when unless through except mod
        modulo remainder out either neither but however wrong incorrect squared cubed factorial choose between hundred
        thousand million billion trillion hundreds thousands millions until divided multiplied root power pi sqrt sin
        cos tan log ln exp frac cdot infinity infty sum product equals false th st nd rd base one two three four five
        six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty
        thirty forty fifty sixty seventy eighty ninety zero third quarter quarters""",
    )
)
"""Words that change what a number says."""
_TOKEN = re.compile(
    r"\s*+(?:(?P<word>[A-Za-z]+)|(?P<power>\^ ?(?:\{ ?)?(?P<n>[23]) ?\}?)|(?P<over>/)|(?P<mark>[\x02\x03.,()-])|(?P<dollar>¤))"
)
_MOST_TOKENS = 24


def scale(text: str) -> tuple[Fraction, str]:
    """The factor of a leading number word (``million``), and the rest.

    Example: ``scale(" million dollars") == (1000000, " dollars")``
    """
    word = re.match(r"[\s\x02]*([a-z]+)(?![A-Za-z])", text)
    if word is None or word[1] not in SCALES:
        return Fraction(1), text
    return Fraction(SCALES[word[1]]), text[word.end() :]


def read_unit(text: str, after_number: bool = True) -> Unit | None:
    """The unit that ``text`` consists of; None where it is more, or something else.

    Words that are no known unit count only after a number, and only where they cannot be variables.
    """
    tokens = _tokens(text)
    if tokens is None:
        return None
    known: list[str] = []
    words: list[str] = []
    power, over = "", ""
    noun = any(_is_noun(word) for word, _ in tokens)
    for word, marked in tokens:
        low = word.lower()
        if low in ("per", "/", "a", "an", "each", "the") and (known or words):
            over = "/" if low in ("per", "/", "each") else over
        elif low in ("square", "sq", "cubic"):
            power = "^3" if low == "cubic" else "^2"
        elif low in ("^2", "^3", "squared", "cubed"):
            if not known:
                return None
            known[-1] += {"squared": "^2", "cubed": "^3"}.get(low, low)
        elif low in ("c", "f") and known[-1:] == ["degree"]:
            known[-1] += low
        elif low in _ALIASES and (marked or low not in _SINGLE or len(tokens) > 1 and known):
            known.append(over + _COMPOUND.get(_ALIASES[low], _ALIASES[low]) + power)
            power, over = "", ""
        elif low in ("unit", "units"):
            known += ["unit" + power] if power else []
            power = ""
        elif low in _NO_UNIT or not (marked or (after_number and (_is_noun(word) or (noun and len(word) > 1)))):
            return None
        else:
            words.append(_singular(low))
            power, over = "", ""
    if power:
        words.append("square" if power == "^2" else "cubic")
    return Unit(frozenset(["".join(known)] if known else []), frozenset(words))


def _tokens(text: str) -> list[tuple[str, bool]] | None:
    """(word, is it marked as text) of a text that holds nothing else than words, powers and slashes."""
    found: list[tuple[str, bool]] = []
    at, marked = 0, False
    text = text.rstrip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or len(found) > _MOST_TOKENS:
            return None
        if token["mark"]:
            marked = token["mark"] == WORDS if token["mark"] in (WORDS, END_WORDS) else marked
        elif token["power"]:
            found.append((f"^{token['n']}", marked))
        else:
            found.append((token["word"] or ("dollar" if token["dollar"] else "/"), marked))
        at = token.end()
    return found


def _is_noun(word: str) -> bool:
    """False for what may be a product of variables (``2 ab``)."""
    low = word.lower()
    return len(word) >= 4 or (len(word) == 3 and low[-1] == "s") or low in ("men", "egg", "boy", "cow", "is", "are")


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
