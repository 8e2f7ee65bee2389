"""Rule-based verifier for mathematics: does a response end in the right answer? (paper section 2.4, eq. 7)

``strict`` (default) finds the answer in this order, and compares numbers exactly, all else as normalised
text:

1. the last ``Answer:`` line (next non-empty line where nothing follows the colon);
2. without one, the last ``\\boxed{...}`` with balanced braces;
3. without either, the last line that starts with ``####`` or ``A:`` (the habit of GSM8K-trained models).

Where there is a ``</think>`` only what follows the last one counts. An answer line with several answers is
wrong.

``verl_compat`` applies the rules of the released recipe, misjudgements included: the last 300 characters,
Minerva's normalisation (Lewkowycz et al. 2022, appendix D.1), string equality.

All passes are linear in the length of the text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards.registry import RewardResult, register_reward

LONGEST_PREDICTION = 256
"""Characters of a prediction that are kept for logs and majority votes."""


@register_reward("math")
def math_reward(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """+1 and acc 1 where the response's answer equals ``answer``, else -1 and 0 (none: ``no_answer``)."""
    strict = options.verifier_mode == "strict"
    found = extract_answer(response) if strict else _released_extract(response)
    if found is None:
        return RewardResult.unscored("no_answer")
    if strict:
        whole = is_equation(answer)
        prediction, wanted = canonical(found, keep_left=whole), canonical(answer, keep_left=whole)
    else:
        prediction, wanted = _released_normalise(found), _released_normalise(answer)
    return RewardResult.of(prediction == wanted, prediction[:LONGEST_PREDICTION])


def check_answer(answer: str) -> str | None:
    """Why no response could be verified against ``answer``, in a few words; None where one can."""
    if not answer.strip():
        return "the answer is empty"
    if not any(c.isalnum() for c in canonical(answer)):
        return f"the answer {answer[:40]!r} has neither a digit nor a letter"
    return None


def require_number(answer: str) -> str | None:
    """Why ``answer`` is not one number (units and LaTeX are fine), in a few words; None where it is one."""
    if reason := check_answer(answer):
        return reason
    if not re.fullmatch(r"-?[0-9]*(?:\.[0-9]+|/[1-9][0-9]*)?", canonical(answer)):
        return f"the answer {answer[:40]!r} is not a number"
    return None


# --- strict: find the answer --------------------------------------------------------------------------------

_MARKER = re.compile(r"(?<![A-Za-z])answer[\s*_]*+[:\uff1a](?:\*\*|__)?", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^<>|\n]{1,60}\|>|</?s>|<pad>|<eos>|<end_of_turn>")
_GSM8K_LINE = re.compile(r"^[ \t]*+(?:####|A[:\uff1a])[ \t]*+(\S[^\n]*)", re.MULTILINE)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*+\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_HEDGE = re.compile(r"[0-9]|\bor\b", re.IGNORECASE)
_TYPOGRAPHY = str.maketrans(
    {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
    | {"\u2212": "-", "\u2013": "-", "\u2009": "\\,", "\u202f": "\\,", "\u00a0": " ", "\u3000": " "}
)


def text_after_answer_marker(response: str) -> str:
    """All that follows the last ``Answer:``, or the whole response; no special tokens, no outer space."""
    text = _SPECIAL_TOKEN.sub("", response)
    marker = _last(_MARKER, text)
    text = text[marker.end() :] if marker else text
    return text.removesuffix("**").strip() if text.count("**") == 1 else text.strip()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    return match


def extract_answer(response: str) -> str | None:
    """The answer as the response writes it, in the module docstring's order; None where it has none."""
    text = _SPECIAL_TOKEN.sub(" ", response.rpartition("</think>")[2])
    marker = _last(_MARKER, text)
    line = _answer_line(text[marker.end() :]) if marker else None
    if line is not None:
        return line
    boxes = _boxes(text)
    if boxes:
        return boxes[-1][2]
    lines = _GSM8K_LINE.findall(text)
    return lines[-1] if lines else None


def _answer_line(rest: str) -> str | None:
    """First line of ``rest`` that is more than delimiters; its box alone if it gives no other answer."""
    start = 0
    for line in rest.split("\n"):
        if line.strip(" \t\r*_$\\[]()`"):
            break
        start += len(line) + 1
    else:
        return None
    boxes = [box for box in _boxes(rest[start:]) if box[0] < len(line)] if "box" in line else []
    if not boxes:
        return line
    end = max(len(line), boxes[-1][1])  # a box may span lines
    outside, at = "", 0
    for box_start, box_end, _ in boxes:
        outside += rest[start + at : start + box_start]
        at = box_end
    outside += rest[start + at : start + end]
    same = len({canonical(content) for _, _, content in boxes}) == 1
    return boxes[-1][2] if same and not _HEDGE.search(outside) else rest[start : start + end]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the outermost balanced boxes, in one pass; escaped braces do not count."""
    found: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int, bool]] = []
    for brace in _BRACES.finditer(text):
        kind = brace.lastgroup
        if kind in ("box", "open"):
            stack.append((brace.start(), brace.end(), kind == "box"))
        elif kind == "close" and stack:
            start, content, is_box = stack.pop()
            while is_box and found and found[-1][0] > start:
                found.pop()  # nested in this one
            if is_box:
                found.append((start, content, brace.end()))
    return [(start, end, text[content : end - 1]) for start, content, end in found]


# --- strict: compare ----------------------------------------------------------------------------------------

_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox|mathrm|mathbf|mathit)\s*+\{([^{}]*)\}")
_THIN_SPACE = re.compile(r"\\[,;: ]|~")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,;: ])(?=[0-9]{3}(?![0-9]))")
_NOISE = re.compile(
    r"\\(?:left|right)(?![a-zA-Z])|\\(?:displaystyle|quad|qquad)(?![a-zA-Z])|(?<!\\)\\[()\[\]]"
    r"|\^\s*+(?:\\circ(?![a-zA-Z])|\{\s*+\\circ\s*+\})|\\degree(?![a-zA-Z])|\\?[$%]|\*\*|[`°€£¥]"
)
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_OPERATOR = re.compile(r"[-+*/^]|(?<![_{])[0-9]|\\(?:frac|cdot|times)(?![a-zA-Z])")
_PARENTHESES = re.compile(r"\([^()]*\)")
_SEVERAL = re.compile(r"[,;]|\b(?:or|and)\b", re.IGNORECASE)
_NO_PREAMBLE = re.compile(r"[0-9,;]|\b(?:or|not|either|neither)\b", re.IGNORECASE)

_DECIMAL = re.compile(r"([-+]?) ?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")
_RATIO = re.compile(r"([-+]?) ?([0-9]+) ?/ ?([0-9]+)")
_LATEX_RATIO = re.compile(r"([-+]?) ?([0-9]*) ?\\frac ?\{ ?(-?[0-9]+) ?\} ?\{ ?(-?[0-9]+) ?\}")
_LEADING_NUMBER = re.compile(
    r"[-+]? ?(?:[0-9]* ?\\frac ?\{[^{}]*\} ?\{[^{}]*\}|[0-9][0-9,]*(?:\.[0-9]+)?(?: ?/ ?[0-9]+)?|\.[0-9]+)"
)
_UNIT_POWER = re.compile(r"(?<=[a-z]) ?\^ ?\{?[23]\}?")
_WORD = re.compile(r"[a-z]+")
UNITS = frozenset(
    _WORD.findall(
        """unit units square squared cubic cubed per percent degree degrees radian radians inch inches foot
        feet yard yards mile miles mm cm km meter meters metre metres kilometers kilometres centimeters
        centimetres ft kg gram grams kilograms pound pounds lb lbs ounce ounces liter liters litres gallon
        gallons second seconds minute minutes hour hours day days week weeks month months year years mph kph
        cent cents dollar dollars point points way ways digit digits integers student students people edges
        vertices sides meals multiples times"""
    )
)
_NOT_A_UNIT = frozenset(_WORD.findall("or and to hundred thousand million billion trillion dozen half plus minus over"))
_MOST_DIGITS = 4000
"""Longer numbers are compared digit by digit, not as fractions (Python parses no more than 4300 digits)."""


def is_equation(answer: str) -> bool:
    """True for ``2x + z = 1``, whose left side is part of the answer; not for ``x = 1`` or ``f(x) = 1``."""
    equals = _last(_EQUALS, answer)
    return equals is not None and bool(_OPERATOR.search(_PARENTHESES.sub("", answer[: equals.start()])))


def canonical(answer: str, keep_left: bool = False) -> str:
    """One spelling for all spellings of an answer: equal answers have equal canonical forms.

    The left side of an equation is dropped unless ``keep_left``.
    Example: ``canonical("x = $1{,}234.50$ dollars.") == canonical("2469/2") == "2469/2"``
    """
    text = _plain(answer, keep_left)
    number = _number(text) or _number(_without_unit(text))
    if number is not None:
        return number
    text = _LATEX_TEXT.sub(r" \1 ", text)
    text = text if text.count("{") == text.count("}") else text.strip("{} ")
    inner = text[1:-1] if text[:1] in "([" and text[-1:] in ")]" else text
    if "," in inner and len(text) > 1:
        opened, closed = (text[0], text[-1]) if inner is not text else ("", "")
        parts = [_number(part.strip()) or _symbols(part) for part in inner.split(",")]
        return opened + ",".join(parts) + closed
    return _number(" ".join(text.split())) or _symbols(text)


def _plain(answer: str, keep_left: bool) -> str:
    """``answer`` without delimiters, mark-up, ``x =``, closing punctuation and runs of white space."""
    text = _SPECIAL_TOKEN.sub(" ", answer).translate(_TYPOGRAPHY)
    for _ in range(3):  # a box in a box, a box behind "x ="
        boxes = _boxes(text) if "box" in text else []
        if len(boxes) != 1 or (text[: boxes[0][0]] + text[boxes[0][1] :]).strip(" $*_.\n"):
            break
        text = boxes[0][2]
    text = _THOUSANDS.sub(",", text.replace("\\!", ""))
    text = _NOISE.sub(" ", _THIN_SPACE.sub(" ", text))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac ?([0-9])", r"\\frac{\1}", text)  # \frac1... -> \frac{1}...
    text = re.sub(r"(\\frac\{[0-9]+\}) ?([0-9])", r"\1{\2}", text)
    text = " ".join(text.split())
    text = text if keep_left else _without_preamble(text)
    return text.lstrip(" *_:").rstrip(" .,;:*_")


def _without_preamble(text: str) -> str:
    """``x = 5`` and ``The area is 5`` -> ``5``, unless what stands before names other answers too."""
    equals = _last(_EQUALS, text)
    if equals and not _SEVERAL.search(_PARENTHESES.sub("", text[: equals.start()])):
        tail = text[equals.end() :].strip()
        boxes = _boxes(tail) if "box" in tail else []
        alone = len(boxes) == 1 and not (tail[: boxes[0][0]] + tail[boxes[0][1] :]).strip(" .")
        return boxes[0][2] if alone else tail
    prose, is_, rest = text.rpartition(" is ")
    return rest if is_ and not _NO_PREAMBLE.search(prose) else text


def _without_unit(text: str) -> str:
    """The number at the start of ``text`` where nothing but a unit follows; else ``text``."""
    number = _LEADING_NUMBER.match(text)
    if number is None:
        return _LATEX_TEXT.sub(r"\1", text).strip()

    def unit(latex: re.Match[str]) -> str:
        words = latex[1].lower().split()
        return " unit" if not _HEDGE.search(latex[1]) and not _NOT_A_UNIT.intersection(words) else latex[0]

    tail = _UNIT_POWER.sub(" ", _LATEX_TEXT.sub(unit, text[number.end() :]).lower())
    return number[0] if all(word in UNITS for word in tail.replace(".", " ").split()) else text


def _number(text: str) -> str | None:
    """``text`` as an exact number in lowest terms (``-3``, ``1/2``), or None where it is not one number."""
    if decimal := _DECIMAL.fullmatch(text):
        whole, places = decimal[2].replace(",", "").lstrip("0"), (decimal[3] or "").rstrip("0")
        if not decimal[2] and not decimal[3]:
            return None
        if len(whole) + len(places) > _MOST_DIGITS:
            return f"{decimal[1].strip('+')}{whole}.{places}".rstrip(".")
        value = Fraction(int((whole + places) or "0"), 10 ** len(places))
        return str(-value if decimal[1] == "-" else value)
    if len(text) > _MOST_DIGITS:
        return None
    if ratio := _RATIO.fullmatch(text):
        sign, whole, above, below = ratio[1], 0, int(ratio[2]), int(ratio[3])
    elif ratio := _LATEX_RATIO.fullmatch(text):
        sign, whole, above, below = ratio[1], int(ratio[2] or 0), int(ratio[3]), int(ratio[4])
    else:
        return None
    if below == 0:
        return None
    value = whole + Fraction(above, below)
    return str(-value if sign == "-" else value)


def _symbols(text: str) -> str:
    """Text that is no number: LaTeX shorthand written out, white space dropped except between digits."""
    text = re.sub(r"(?<![0-9.]) | (?![0-9.])", "", " ".join(text.split()))
    text = re.sub(r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2", text)
    return text[1:-1] if re.fullmatch(r"\([A-Z]\)|\{[^{}]*\}", text) else text


# --- verl_compat: the released rules ------------------------------------------------------------------------

_RELEASED_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_RELEASED_REWRITES = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_RELEASED_DELETIONS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}",
    "\\text{}^2", "\\text{}^3",
    "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip


def _released_extract(response: str) -> str | None:
    found = _RELEASED_ANSWER.findall(response[-300:])
    return found[-1] if found else None


def _released_normalise(answer: str) -> str:
    """Minerva's normal form. Order matters: each rewrite sees what the ones before it left."""
    text = answer.rpartition("=")[2]
    for before, after in _RELEASED_REWRITES:
        text = text.replace(before, after)
    for word in _RELEASED_DELETIONS:
        text = text.replace(word, "")
    text = "\n".join(_released_line(line) for line in text.split("\n"))
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


def _released_line(line: str) -> str:
    """What the first two dollars hold; then wrappers go, up to the next brace, and a box, up to the last."""
    parts = line.split("$", 2)
    if len(parts) == 3:
        line = f"${parts[1]}$"
    for wrapper in ("\\text{", "\\textbf{", "\\overline{"):
        line = _unwrap(line, wrapper)
    start, end = line.find("\\boxed{"), line.rfind("}")
    return line[:start] + line[start + 7 : end] + line[end + 1 :] if 0 <= start < end else line


def _unwrap(line: str, opener: str) -> str:
    """``opener...}`` -> ``...`` from left to right, each up to the nearest closing brace."""
    done, at = [], 0
    while (start := line.find(opener, at)) >= 0 and (end := line.find("}", start + len(opener))) >= 0:
        done += [line[at:start], line[start + len(opener) : end]]
        at = end + 1
    return "".join(done) + line[at:]
