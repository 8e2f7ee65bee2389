"""Which answers of a row can be verified against; asked when rows are read, before anything is trained."""

from __future__ import annotations

import re

from megatron_dapo.rewards.answers.notation import plain
from megatron_dapo.rewards.answers.parse import parse
from megatron_dapo.rewards.answers.relations import is_false

_SENTINELS = frozenset(
    s.strip()
    for s in """proof; proved; proven; notfound; not found; none; null; n/a; nil; nan; unknown; not available; not
applicable; not given; not provided; not specified; no answer; no final answer; answer; omitted; missing; error; todo;
tbd; solution; see solution; undisclosed; unanswered; no solution provided; no answer provided; problem is unsolved;
inconclusive; placeholder; qed; unsolved; ambiguous; invalid; empty; blank""".replace("\n", " ").split(";")
)
"""What data sets write where they have no answer."""
_NOT_AVAILABLE = ("NA", "N.A", "n.a")
_POINTER = re.compile(
    r"(?:see|refer to|cf|as shown in|check)\b.*\b(?:solution|proof|above|below|explanation|text|figure|answer|work|details)\b.*"
    r"|(?:the )?(?:proof|statement|claim|identity|inequality) (?:is |has been |was )?"
    r"(?:complete|completed|omitted|proved|proven|shown|above|below|holds|follows|required|needed|not shown).*"
    r"|proof (?:of|by|that|in)\b.*|no (?:final |numerical |single )?answer\b.*"
    r"|(?:answer )?not (?:found|available|given|provided)\b.*"
    r"|to be (?:proven|proved|shown|determined|announced|completed)|answers? (?:may )?var(?:y|ies)"
)
_REPR = re.compile(
    r"(?i:true|false)|None|[-+]?(?:nan|NaN|inf|Inf|Infinity)|\{\}|\[\]|\(\)|(?:set|dict|list|tuple)\(\)"
    r"|<[^<>]* at 0x[0-9a-fA-F]+>"
    r"|<class .*>|\[object Object\]|(?:Decimal|Fraction|array|tensor|Timestamp|datetime\.\w+|np\.\w+|frozenset|b)\s*[(\[\"'].*"
    r"|[{\[(]\s*[bru]?(?:'[^']*'|\"[^\"]*\")\s*[:,\]})].*|\{\s*[0-9]+\s*:.*\}|.*[{,]\s*\"[^\"]*\"\s*:.*",
    re.DOTALL,
)
_LONGEST_REPR = 2000
_DANGLING = re.compile(r"(?:[-+*/^_=<>≤≥≠∈≈∪±,]|\\(?:frac|sqrt|cdot|times|binom|div|text|boxed))\s*\Z")
_ARGUMENTS = re.compile(
    r"\\(?:frac|binom)(?! ?(?:\{|[0-9a-zA-Z\\]))|\\(?:frac|binom) ?\{[^{}]*\}(?! ?(?:\{|[0-9a-zA-Z\\]))"
)
_ZERO_BELOW = re.compile(r"\\frac ?\{[^{}]*\} ?\{ ?0+ ?\}|/ ?0+(?![0-9.])")


def check_answer(answer: str) -> str | None:
    """Why no response could be verified against ``answer``, in a few words; None where one can."""
    if not answer.strip():
        return "it is empty"
    if _REPR.fullmatch(answer.strip()[:_LONGEST_REPR]):
        return "it is a Python or JSON value, no mathematics (write \\text{...} around a word that is meant)"
    if _says_none(answer):
        return "it says that there is none"
    text = plain(answer)
    if not any(c.isalnum() for c in text) and "∅" not in text and text != "\\{\\}":
        return "it has neither a digit nor a letter"
    if reason := _cannot_be_parsed(answer, text):
        return f"it cannot be parsed: {reason}"
    return None


def _says_none(answer: str) -> bool:
    bare = " ".join(re.sub(r"\\[a-zA-Z]+|[{}$_\\]", " ", answer[:500]).casefold().split()).strip(" .!?()[]*:")
    compact = bare.replace("-", "").replace(".", "")
    return (
        bare in _SENTINELS
        or compact in _SENTINELS
        or answer.strip(" .") in _NOT_AVAILABLE
        or bool(_POINTER.fullmatch(bare))
    )


def require_number(answer: str) -> str | None:
    """Why ``answer`` is not one number (a unit, a name as in ``x = 5`` and LaTeX are fine); None where it is one."""
    if reason := check_answer(answer):
        return reason
    if parse(answer).kind != "number":
        return "it is not a number (--answer-type any takes LaTeX and text as well)"
    return None


def _cannot_be_parsed(answer: str, text: str) -> str | None:
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", answer, re.DOTALL):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth < 0:
            break
    if depth:
        return "its braces do not match"
    if answer.count("\\begin{") != answer.count("\\end{") or answer.count("\\left") != answer.count("\\right"):
        return "what it opens is not closed"
    if sum(map(text.count, "([")) > sum(map(text.count, ")]")):
        return "its brackets do not match"
    if _DANGLING.search(text):
        return "something is missing at its end"
    if _ARGUMENTS.search(text):
        return "a fraction without its two parts"
    if _ZERO_BELOW.search(text):
        return "it divides by 0"
    return "the equation is false" if len(text) < 500 and is_false(parse(answer)) else None
