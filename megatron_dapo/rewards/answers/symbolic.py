"""Are two expressions the same? Read by math-verify, compared exactly.

Slow beside everything else here, and able to hang on what a model may write: it belongs into a worker that can be
killed. Numbers never come here.
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

from megatron_dapo.types import InputError

_LONGEST = 300
_DEEPEST = 12
_EXPONENT_DIGITS = 5
_DIGITS = 40
_COMMANDS = """frac sqrt pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp cdot times div binom
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi chi psi
omega Gamma Delta Theta Lambda Sigma Phi Psi Omega hat bar lfloor rfloor lceil rceil"""
_READABLE = re.compile(
    rf"(?:\\(?:{'|'.join(_COMMANDS.split())})(?![a-zA-Z])|\\(?:begin|end)\{{[bpvB]?matrix\}}|\\\\"
    r"|(?<![a-zA-Z])[a-zA-Z]{1,3}(?![a-zA-Z])|[0-9+\-*/^_=<>≤≥≠!|(){}\[\].,& '])++"
)
_AMBIGUOUS = re.compile(
    r"[0-9] [0-9]|/ ?[0-9]+ ?(?:[a-zA-Z(]|\\(?!\\|end\{))|[A-Z] ?[A-Z(]|'|,"
    r"|[0-9] ?\^ ?\{? ?-?[0-9]+ ?\^|\^ ?\{? ?-?[0-9]{5}|[0-9]{4} ?!|! ?!|\) ?!"
    r"|\^.*\\binom|\) ?\^ ?\{? ?-?[0-9]{3}|\\binom.*[0-9]{5}|[0-9)] ?\}? ?_|_\{? ?[0-9]+ ?\}? ?\^"
)
"""What may be read in two ways, or takes for ever."""
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_POINTS = ((7312, 5003, 2417, 9001, 3109, 8443), (-4409, 6011, -7907, 2411, 5119, -3301),
           (2203, -5987, 8011, -3011, -7109, 4201), (9973, 1201, 3307, 5501, 811, 6709))  # fmt: skip
_POINT_SCALE = 4001


def check_installed() -> None:
    """Import nothing, which takes a second or more: runs over numbers never need it.

    Raises: ``InputError`` where math-verify is not installed.
    """
    if missing := [name for name in ("sympy", "math_verify", "antlr4") if find_spec(name) is None]:
        raise InputError(
            f"the math reward needs math-verify ({missing[0]} is missing): pip install 'math-verify[antlr4-13-2]'"
        )


@cache
def library() -> tuple[Any, Any, Any]:
    """sympy, math-verify's parser and its comparison, imported with the first expression."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    # It would take 4t for 4 tonnes: what is no mathematics is gone before.
    as_written = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
    )
    target = [LatexExtractionConfig(normalization_config=as_written)]

    def read(latex: str) -> list[Any]:
        found: list[Any] = parse(f"${latex}$", target, parsing_timeout=None, raise_on_error=False)
        return found

    def same(a: list[Any], b: list[Any]) -> bool:
        return bool(verify(a, b, float_rounding=15, numeric_precision=30, strict=True, timeout_seconds=None))

    return sympy, read, same


def readable(text: str) -> bool:
    """True where ``text`` is an expression or relation that can only be read in one way, and evaluated soon."""
    if len(text) > _LONGEST or not _READABLE.fullmatch(text) or _AMBIGUOUS.search(text):
        return False
    opened: list[bool] = []  # brackets, True for exponents
    digits = 0
    for at, char in enumerate(text):
        before = text[:at].rstrip()[-1:]
        if char in "({[":
            opened.append(before == "^")
        elif char in ")}]" and not opened:
            return False
        elif char in ")}]":
            digits = 0 if opened.pop() else digits
        elif any(opened):  # 9^{9^9}, 2^{99!}, 2^{9999 \cdot 9999} do not end
            digits += char.isdigit()
            if digits > _EXPONENT_DIGITS or char == "!" or (char == "^" and before in tuple("0123456789)}")):
                return False
    return not opened and _depth(text) <= _DEEPEST


def _depth(text: str) -> int:
    depths = accumulate((char in "({[") - (char in ")}]") for char in text)
    return max(depths, default=0)


def equal(a: str, b: str) -> bool:
    """True where both are readable and equal for all values of their variables, or relations that say the same."""
    if not readable(a) or not readable(b):
        return False
    _, _, same = library()
    left, right = _read(a), _read(b)
    if not left or not right:
        return False
    verdict = _agree(left[0], right[0])
    return (same(left, right) and same(right, left)) if verdict is None else verdict


@lru_cache(maxsize=256)
def _read(text: str) -> list[Any]:
    latex = _DECIMAL.sub(lambda d: rf"\frac{{{int(d[1] + d[2])}}}{{1{'0' * len(d[2])}}}", text)
    for sign, command in {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "}.items():
        latex = latex.replace(sign, command)
    sympy, read, _ = library()
    found: list[Any] = read(latex)
    return found if found and isinstance(found[0], (sympy.Basic, sympy.MatrixBase)) else []


def _agree(a: Any, b: Any) -> bool | None:
    """Equality of two expressions or matrices; None where they are neither."""
    sympy, _, _ = library()
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(_agree(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return _agree_everywhere(a, b)
    relations = (sympy.core.relational.Relational, sympy.logic.boolalg.Boolean)
    return None if isinstance(a, relations) and isinstance(b, relations) else False


def _agree_everywhere(a: Any, b: Any) -> bool:
    """Both have the same value to 30 digits at points of all signs: what differs anywhere differs there."""
    sympy, _, _ = library()
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    compared = 0
    for point in _POINTS if symbols else _POINTS[:1]:
        values = {s: sympy.Rational(point[i % len(point)] + 13 * i, _POINT_SCALE) for i, s in enumerate(symbols)}
        x, y = (e.subs(values).evalf(_DIGITS) for e in (a, b))
        if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
            continue
        if abs(x - y) > abs(x) * sympy.Float(10) ** -30 + sympy.Float(10) ** -35:
            return False
        compared += 1
    if not symbols and (a - b).doit().is_Number:
        return bool((a - b).doit() == 0)  # 1999^1999 and its successor agree to 30 digits
    return compared >= (2 if symbols else 1)
