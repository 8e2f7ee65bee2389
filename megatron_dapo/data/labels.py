"""The answer of a row."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from typing import Any

from megatron_dapo.data.rows import RowError, kind_of


def answer_in(label: Any, pattern: str | None) -> str:
    """The answer in a label: a text or a number, of which 72.0 is the number 72. ``pattern`` (``--label-regex``) finds it, or
    it is what follows ``####``, or all.

    Raises:
        RowError: there is none, or the label is something else.
    """
    text = _as_text(label)
    if pattern is None:
        answer = text.rsplit("####", 1)[-1].strip()
    else:
        found = list(re.finditer(pattern, text))
        if not found:
            raise RowError(f"--label-regex {pattern!r} is nowhere in its label {text[-60:]!r}")
        answer = (found[-1].group(1 if found[-1].re.groups else 0) or "").strip()
    if not answer:
        raise RowError("its answer is empty; fix the row or remove it")
    return answer


def _as_text(label: Any) -> str:
    if isinstance(label, str):
        return label
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if isinstance(label, Decimal) and label.is_finite():
        return f"{label:f}"
    if isinstance(label, float) and isfinite(label):
        return str(int(label)) if label.is_integer() and abs(label) < 2**53 else repr(label)
    if isinstance(label, list):
        raise RowError(f"its answer is a list of {len(label)}; name one element, as in --label-key answer.0")
    raise RowError(
        f"its answer is {label if isinstance(label, float) else kind_of(label)}; it has to be a text or a number"
    )


def comparable(answer: str) -> str:
    """The same text for answers that are the same number, as 2, 2.0 and 4/2 are; else the answer itself."""
    if len(answer) < 100 and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+|/0*[1-9][0-9]*)?", answer):
        return str(Fraction(answer))
    return answer
