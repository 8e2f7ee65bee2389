"""Where a response states its answer. Only the last statement counts, also where it was cut off."""

from __future__ import annotations

import re

SPECIAL_TOKEN = re.compile(r"<\|[^<>|\n]{1,60}\|>|</?s>|<pad>|<eos>|<end_of_turn>")
HEDGE = re.compile(r"[0-9]|\bor\b", re.IGNORECASE)
"""Beside a box it shows that the box is not the whole answer."""

_MARKER = re.compile(r"(?<![A-Za-z])answer[\s*_]*+[:\uff1a](?:\*\*|__)?", re.IGNORECASE)
_GSM8K_LINE = re.compile(r"^[ \t]*+(?:####|A[:\uff1a])[ \t]*+(\S[^\n]*)", re.MULTILINE)
_SENTENCE = re.compile(r"(?<![A-Za-z])answer[ \t]++(?:is|equals)\b[ \t:]*+", re.IGNORECASE)
_BRACES = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*+(?:(?P<box>\{)|(?P<bare>[-+]?[0-9][0-9.,/]*+|[A-Za-z])|(?P<cut>\Z))"
    r"|(?P<part>\\b(?:oxe|ox|o)?+\Z)|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.()\[\]]|\\[()\[\],;: ]|\\q?quad|\\(?:text|mbox)\{\s*(?:and|or),?\s*\}|and|or)*+"
)
_LONGEST_GAP = 40
_LONGEST_MATRIX = 50


def text_after_answer_marker(response: str) -> str:
    """All that follows the last ``Answer:``, or the whole response; no special tokens, no outer space."""
    text = SPECIAL_TOKEN.sub("", response)
    marker = _last(_MARKER, text)
    text = text[marker.end() :] if marker else text
    return text.removesuffix("**").strip() if text.count("**") == 1 else text.strip()


def extract_answer(response: str) -> str | None:
    """The answer as the response writes it; None where it has none, or where its last one was cut off.

    In this order: the last ``Answer:`` line; the last box, with those that ``and``, ``or`` or a comma join to it; the
    last line that starts with ``####`` or ``A:``; the last sentence "... answer is ...".
    Example: ``extract_answer(r"First \\boxed{5}. Then \\boxed{") is None``
    """
    text = SPECIAL_TOKEN.sub(" ", response.rpartition("</think>")[2])
    if marker := _last(_MARKER, text):
        return _answer_line(text[marker.end() :])
    found, unclosed = boxes(text)
    if unclosed > (found[-1][0] if found else -1):
        return None
    if found:
        return _last_boxes(text, found)
    if lines := _GSM8K_LINE.findall(text):
        return str(lines[-1])
    sentence = _last(_SENTENCE, text)
    return text[sentence.end() :].partition("\n")[0].strip() or None if sentence else None


def boxes(text: str) -> tuple[list[tuple[int, int, str]], int]:
    """(start, end, content) of the outermost balanced boxes, in one pass, and where the last one begins that is never
    closed (-1: none). Escaped braces do not count."""
    found: list[tuple[int, int, int, int]] = []
    stack: list[tuple[int, int, bool]] = []
    unclosed = -1
    for brace in _BRACES.finditer(text):
        kind = brace.lastgroup
        if kind in ("box", "open"):
            stack.append((brace.start(), brace.end(), kind == "box"))
        elif kind == "bare":
            found.append((brace.start(), brace.end(), brace.start("bare"), brace.end()))
        elif kind in ("cut", "part"):
            unclosed = brace.start()
        elif kind == "close" and stack:
            start, content, is_box = stack.pop()
            while is_box and found and found[-1][0] > start:
                found.pop()  # nested in this one
            if is_box:
                found.append((start, brace.end(), content, brace.end() - 1))
    unclosed = max([unclosed, *(start for start, _, is_box in stack if is_box)])
    return [(start, end, text[first:last]) for start, end, first, last in found], unclosed


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    return match


def _last_boxes(text: str, found: list[tuple[int, int, str]]) -> str | None:
    """The last box, and the ones before it that are part of the same list."""
    first = len(found) - 1
    while first and found[first][0] - found[first - 1][1] <= _LONGEST_GAP:
        if not _BETWEEN_BOXES.fullmatch(text, found[first - 1][1], found[first][0]):
            break
        first -= 1
    if not found[-1][2].strip():
        return None
    return ", ".join(dict.fromkeys(content for _, _, content in found[first:] if content.strip()))


def _answer_line(rest: str) -> str | None:
    """First line of ``rest`` that is more than delimiters; its box alone if it gives no other answer."""
    start = 0
    for line in rest.split("\n"):
        if line.strip(" \t\r*_$\\[]()`"):
            break
        start += len(line) + 1
    else:
        return None
    length = _whole_matrix(rest, start, len(line))
    if "\\b" not in line and "box" not in line:
        return rest[start : start + length]
    found, unclosed = boxes(rest[start:])
    inside = [box for box in found if box[0] < length]
    if (inside[-1][0] if inside else -1) < unclosed < length:
        return None
    if not inside:
        return rest[start : start + length]
    end = max(length, inside[-1][1])  # a box may span lines
    outside, at = "", 0
    for box_start, box_end, _ in inside:
        outside += rest[start + at : start + box_start]
        at = box_end
    outside += rest[start + at : start + end]
    same = len({content.strip() for _, _, content in inside}) == 1
    return inside[-1][2].strip() or None if same and not HEDGE.search(outside) else rest[start : start + end]


def _whole_matrix(rest: str, start: int, length: int) -> int:
    """How far an answer goes whose line opens an environment (a matrix over several lines)."""
    for _ in range(_LONGEST_MATRIX):
        line = rest[start : start + length]
        if line.count("\\begin{") <= line.count("\\end{") or start + length >= len(rest):
            break
        following = rest.find("\n", start + length + 1)
        length = (following if following >= 0 else len(rest)) - start
    return length
