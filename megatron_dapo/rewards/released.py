"""The rules of the released recipe, misjudgements included (``verl_compat``).

The last 300 characters, Minerva's normal form (Lewkowycz et al. 2022, appendix D.1), string equality. Nothing here
changes: it is what published runs were trained with.
"""

from __future__ import annotations

import re

_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REWRITES = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_DELETIONS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}",
    "\\text{}^2", "\\text{}^3",
    "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip


def extract(response: str) -> str | None:
    """What follows the last ``Answer:`` of the last 300 characters, up to the end of its line."""
    found = _ANSWER.findall(response[-300:])
    return found[-1] if found else None


def normalise(answer: str) -> str:
    """Minerva's normal form. Order matters: each rewrite sees what the ones before it left."""
    text = answer.rpartition("=")[2]
    for before, after in _REWRITES:
        text = text.replace(before, after)
    for word in _DELETIONS:
        text = text.replace(word, "")
    text = "\n".join(_line(line) for line in text.split("\n"))
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


def _line(line: str) -> str:
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
