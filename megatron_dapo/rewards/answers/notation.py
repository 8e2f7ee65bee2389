"""One notation for an answer's text: mark-up, delimiters and typography go, what they mean stays."""

from __future__ import annotations

import re

from megatron_dapo.rewards.answers.extraction import SPECIAL_TOKEN, boxes
from megatron_dapo.rewards.answers.units import END_WORDS, WORDS

LONGEST_STRUCTURE = 2000
"""Characters up to which an answer is read; longer ones are a number, or compared as they are."""

_CODES: dict[int, str] = {
    code: chr(code - 0xFEE0)
    for code in range(0xFF01, 0xFF5F)  # full-width forms of ASCII
}
_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u2009": "\\,", "\u202f": "\\,", "\u00a0": " ", "\u3000": " ", "\u200b": "",
    "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∞": "\\infty ",
    "π": "\\pi ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∈": "\\in ",
    "∅": "\\emptyset ", "±": "\\pm ", "°": "^\\circ ", "²": "^2", "³": "^3", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}", "¢": " cents", "’": "'", "\u2014": "-", "ℝ": "\\mathbb{R}",
}  # fmt: skip
_TYPOGRAPHY = str.maketrans(_CODES | {ord(k): v for k, v in _SYMBOLS.items()})
_ROOT = re.compile(
    r"√ ?(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[a-zA-Z]))|(?<![\\a-zA-Z])sqrt ?(?:\(([^()]*)\)|\{([^{}]*)\})"
)

_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|sl|sc|up|md)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm"
    r"|operatorname)\s*+\{([^{}]*)\}"
)
_JOINT = re.compile(rf"{WORDS}\s*+(,?\s*+(?:and|or),?)\s*+{END_WORDS}", re.IGNORECASE)
_RELATIONS = re.compile(
    r"\\(?:(?P<le>le|leq|leqslant)|(?P<ge>ge|geq|geqslant)|(?P<ne>ne|neq)|(?P<lt>lt)|(?P<gt>gt)|(?P<approx>approx)"
    r"|(?P<in>in)|(?P<cup>cup)|(?P<empty>emptyset|varnothing)|(?P<pm>pm))(?![a-zA-Z])"
    r"|(?P<le2><=)|(?P<ge2>>=)|(?P<ne2>!=|\\not ?=)"
)
_RELATION_SIGNS = {
    "le": "≤", "ge": "≥", "ne": "≠", "lt": "<", "gt": ">", "approx": "≈", "in": "∈", "cup": "∪", "empty": "∅",
    "pm": "±", "le2": "≤", "ge2": "≥", "ne2": "≠",
}  # fmt: skip
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\! ?|\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))")
_SPACE = re.compile(
    r"(?<!\\)\\[,;: ]|~|\\(?:q?quad|displaystyle|textstyle|limits|hspace\*?\{[^{}]*\})(?![a-zA-Z])|(?<!\\)\\\n"
)
_BRACKETS = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|\\[lr](?:paren|brack)(?![a-zA-Z])")
_MATH = re.compile(r"(?<!\\)\\[()\[\]]|\*\*|`|\\(?=\s*\Z)")
_PERCENT = re.compile(r"\\?%|(?<![A-Za-z])per ?cent(?![A-Za-z])|(?<![A-Za-z])pct(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*+(?:\\circ(?![a-zA-Z])|\{\s*+\\circ\s*+\})|\\(?:degree|textdegree)(?![a-zA-Z])")
_HALF_DAY = re.compile(r"(?<![A-Za-z])([AaPp])\. ?[Mm]\.?(?![A-Za-z])")
_CURRENCY = {"€": " euro", "£": " pound", "¥": " yen", "₹": " rupee"}
_PREFIX = re.compile(r"([€£¥₹])\s*+([-+]?[0-9][0-9,]*+(?:\.[0-9]+)?)")
_LONE_DOLLAR = re.compile(r"\$(?= ?[0-9.])|(?<=[0-9])\$")
_SHORT_FRACTION = re.compile(r"\\frac ?([0-9a-zA-Z])(?= ?[0-9a-zA-Z{\\])")
_HALF_FRACTION = re.compile(r"(\\frac\{[0-9a-zA-Z]+\}) ?([0-9a-zA-Z])")
_SENTENCES = re.compile(r"(?<=[^\s.])[.!]+ +(?=[A-Z])")
_NOT_AN_ASIDE = re.compile(
    r"[0-9=\\^]|\b(?:or|not|but|wrong|incorrect|however|actually|wait|instead|alternatively|(?-i:[B-HJ-Z]))\b",
    re.IGNORECASE,
)
_OPENING = re.compile(
    r"(?:(?:thus|therefore|hence|so|then|finally|we (?:get|have|find|obtain)(?: that)?)\b[,:]? +)++",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    r" (?:is|as) (?:correct|right|(?:our|the|my) (?:final |correct |right )?(?:answer|solution|result|option|choice))$",
    re.IGNORECASE,
)
_VERB = re.compile(r" (?:is|are|was|were|equals|has|have|gives):? ", re.IGNORECASE)
_NO_PREAMBLE = re.compile(r"[0-9,;=<>]|\b(?:or|not|either|neither|if|when)\b|^\(?[a-z](?:\)|[:.])", re.IGNORECASE)


def plain(answer: str) -> str:
    """``answer`` in one notation: no delimiters, boxes, mark-up or prose around it; relations as single signs; what
    LaTeX marks as text between two marks; ``\\$`` as ``¤``.

    Example: ``plain(r"Thus the area is $\\boxed{10{,}000}$.") == "10,000"``
    """
    text = SPECIAL_TOKEN.sub(" ", answer)
    if len(text) > LONGEST_STRUCTURE:
        text = text.strip(" \t\r\n*_$`")
        return text if len(text) <= LONGEST_STRUCTURE else text.replace("{,}", "").replace("\\!", "").rstrip(".")
    text = _PREFIX.sub(r"\2 \1", text)
    for sign, unit in _CURRENCY.items():
        text = text.replace(sign, unit)
    text = _unboxed(_THOUSANDS.sub("", text.translate(_TYPOGRAPHY)).replace("\\!", ""))
    text = _ROOT.sub(lambda m: rf"\sqrt{{{next(g for g in m.groups() if g is not None)}}}", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    text = _without_delimiters(text)
    text = _RELATIONS.sub(lambda m: f" {_RELATION_SIGNS[str(m.lastgroup)]} ", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\[dt]binom(?![a-zA-Z])", r"\\binom", text)
    text = _HALF_FRACTION.sub(r"\1{\2}", _SHORT_FRACTION.sub(r"\\frac{\1}", text))
    for _ in range(2):  # \text{\textbf{x}}
        text = _TEXT.sub(rf" {WORDS}\1{END_WORDS} ", text)
    text = _JOINT.sub(r" \1 ", text)
    text = " ".join(text.replace("{,}", ",").split())
    text = re.sub(r" (?=[.,;!](?: |$))", "", text)
    return _without_prose(text).strip(" *_:").rstrip(" .,;:*_")


def _unboxed(text: str) -> str:
    for _ in range(3):  # a box in a box
        found = boxes(text)[0] if "box" in text else []
        if not found:
            break
        kept, at = [], 0
        for start, end, content in found:
            adjacent = at > 0 and not text[at:start].strip(" $")
            kept += [", " if adjacent else text[at:start], f" {content} "]
            at = end
        text = "".join(kept) + text[at:]
    return text


def _without_delimiters(text: str) -> str:
    text = text.replace("\\$", " ¤")
    if text.count("$") % 2:
        text = _LONE_DOLLAR.sub("¤", text, count=1)
    text = _MATH.sub(" ", text.replace("$", " "))
    text = _BRACKETS.sub("", _SPACE.sub(" ", text))
    text = _HALF_DAY.sub(r"\1m", text)
    return _PERCENT.sub(" percent ", _DEGREE.sub(" degree ", text))


def _without_prose(text: str) -> str:
    """``So the area is 5. I hope it is correct.`` -> ``5``, unless what goes names other answers too."""
    if " " not in text:
        return text
    sentences = _SENTENCES.split(text, maxsplit=1)
    if len(sentences) == 2 and not _NOT_AN_ASIDE.search(sentences[1]):
        text = sentences[0]
    text = text.rstrip(" .")
    text = _CLOSING.sub("", text)
    if opening := _OPENING.match(text):
        text = text[opening.end() :]
    verb = None
    for verb in _VERB.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    if verb and not _NO_PREAMBLE.search(text[: verb.start()]):
        return text[verb.end() :]
    return text


OPENERS, CLOSERS = "([{", ")]}"


def pieces(text: str, separators: str) -> list[tuple[str, str]]:
    """(piece, the separator behind it), split outside of all brackets."""
    found, depth, start, at = [], 0, 0, 0
    while at < len(text):
        char = text[at]
        if char in OPENERS:
            depth += 1
        elif char in CLOSERS:
            depth = max(0, depth - 1)
        elif depth == 0 and char in separators:
            found.append((text[start:at], char))
            start = at + 1
        elif depth == 0 and char in "ao" and (at == 0 or not text[at - 1].isalpha()) and "," in separators:
            word = "and" if text.startswith("and", at) else "or" if text.startswith("or", at) else ""
            if word and not text[at + len(word) : at + len(word) + 1].isalpha() and text[at - 1 : at] != "\\":
                found.append((text[start:at], word))
                start = at + len(word)
                at = start - 1
        at += 1
    return [*found, (text[start:], "")]


def symbols(text: str) -> str:
    """An expression in one spelling: LaTeX shorthand written out, white space dropped except between digits."""
    text = text.replace(WORDS, " ").replace(END_WORDS, " ")
    text = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])", r"\1\n", " ".join(text.split()))
    text = re.sub(r"(?<![0-9.]) | (?![0-9.])", "", text).replace("\n", " ")
    text = re.sub(r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2", text)
    text = re.sub(r"(?<=[0-9])([AaPp])[Mm]$", lambda m: f"{m[1].lower()}m", text)
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text
