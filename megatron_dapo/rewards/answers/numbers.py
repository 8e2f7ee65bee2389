"""Numbers, exactly: integers of any size, decimals, fractions, mixed numbers, powers of ten."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MOST_DIGITS = 4000
"""Longer numbers are compared digit by digit, not as fractions (Python parses no more than 4300 digits)."""
_LARGEST_EXPONENT = 1000

_DECIMAL = re.compile(r"([-+]?) ?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")
_RATIO = re.compile(r"([-+]?) ?([0-9]+) ?/ ?([0-9]+)")
_LATEX_RATIO = re.compile(
    r"([-+]?) ?([0-9]*) ?\\frac ?\{ ?([-+]?)([0-9]+(?:\.[0-9]+)?) ?\} ?\{ ?([-+]?)([0-9]+(?:\.[0-9]+)?) ?\}"
)
_SCIENTIFIC = re.compile(
    r"([-+]? ?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:[eE]([-+]?[0-9]{1,5})| ?(?:\\times|\\cdot|\*) ?10 ?\^ ?(?:\{ ?([-+]? ?[0-9]{1,5}) ?\}|([0-9])))"
)
LEADING_NUMBER = re.compile(
    r"[-+]? ?(?:[0-9]* ?\\frac ?\{[^{}]*\} ?\{[^{}]*\}|(?:[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9][0-9,]*)(?:\.[0-9]+)?"
    r"(?: ?/ ?[0-9]+)?|\.[0-9]+)(?: ?\\times ?10 ?\^ ?(?:\{ ?-?[0-9]+ ?\}|[0-9]))?"
)
"""A number at the start of a text, where a unit may follow."""
_ARITHMETIC = re.compile(r"[-+*/^0-9(). ]+")


def exact(text: str) -> str | None:
    """``text`` as an exact number in lowest terms (``-3``, ``1/2``), or None where it is not one number.

    Example: ``exact("1,234.50") == "2469/2"``
    """
    if decimal := _DECIMAL.fullmatch(text):
        whole, places = re.sub("[, ]", "", decimal[2]).lstrip("0"), (decimal[3] or "").rstrip("0")
        if not decimal[2] and not decimal[3]:
            return None
        if len(whole) + len(places) > MOST_DIGITS:
            return f"{decimal[1].strip('+')}{whole}.{places}".rstrip(".")
        value = Fraction(int((whole + places) or "0"), 10 ** len(places))
        return str(-value if decimal[1] == "-" else value)
    fraction = _fraction(text) if len(text) <= MOST_DIGITS else None
    return None if fraction is None else str(fraction)


def _fraction(text: str) -> Fraction | None:
    if ratio := _RATIO.fullmatch(text):
        sign, whole, above, below = ratio[1], 0, Fraction(ratio[2]), Fraction(ratio[3])
    elif ratio := _LATEX_RATIO.fullmatch(text):
        sign, whole = ratio[1], int(ratio[2] or 0)
        above, below = _signed(ratio[3], Fraction(ratio[4])), _signed(ratio[5], Fraction(ratio[6]))
    elif power := _SCIENTIFIC.fullmatch(text):
        exponent = int((power[2] or power[3] or power[4]).replace(" ", ""))
        return Fraction(power[1].replace(" ", "")) * Fraction(10) ** exponent if abs(exponent) < 1000 else None
    else:
        return None
    if below == 0:
        return None
    return _signed(sign, whole + above / below)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def scaled(number: str, factor: Fraction) -> str | None:
    """An exact number times ``factor``; None where it has too many digits."""
    if len(number) > MOST_DIGITS:
        return None
    return str(Fraction(number) * factor)


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def arithmetic(text: str) -> str | None:
    """Value of a sum such as ``3 \\times 4 + 5``, exactly; None where it is anything else.

    Example: ``arithmetic("3+4") == "7"``
    """
    plain = re.sub(r"\\(?:times|cdot)(?![a-zA-Z])", "*", text).replace("\\div", "/").replace("^", "**").strip()
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", plain)
    if len(plain) > 200 or not _ARITHMETIC.fullmatch(plain):
        return exact(text.strip())
    try:
        return str(_value(ast.parse(plain, mode="eval").body, plain))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        return None


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(source[node.col_offset : node.end_col_offset])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return _value(node.operand, source) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, source), _value(node.right, source)
        if isinstance(node.op, ast.Pow):
            if right.denominator != 1 or abs(right) * max(1, left.numerator.bit_length()) > _LARGEST_EXPONENT:
                raise ValueError("too large a power")
            return left ** int(right)
        if operation := _OPERATIONS.get(type(node.op)):
            return operation(left, right)
    raise ValueError("not arithmetic")
