"""Rows of .jsonl, .jsonl.gz and .parquet files, with the place of each for error messages.

Whatever such a file holds, reading it gives rows or an ``InputError`` of one line that names file and row.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.types import InputError

DEEPEST = 64
"""Levels of lists and objects a row may have: far more than data has, far fewer than what exhausts a recursive reader."""

_OTHER_KINDS = {
    b"\x1f\x8b": "gzip data; name it .jsonl.gz",
    b"PAR1": "parquet data; name it .parquet",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe\x00\x00": "UTF-32 text; save it as UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32 text; save it as UTF-8",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
"""First bytes of what is no JSON lines in UTF-8."""


class RowError(ValueError):
    """A row cannot be used. The message says why; its place is added where it is known."""


@dataclass(frozen=True)
class Row:
    """One row of a file; ``number`` counts from 1, as editors do."""

    path: str
    number: int
    fields: dict[str, Any]

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.path} row {self.number}"

    def get(self, key: str) -> Any:
        """The value of column ``key``, or of the path it is: dots go into nested fields and, by number from 0, into lists.
        None where there is none."""
        if key in self.fields:
            return self.fields[key]
        value: Any = self.fields
        for part in key.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value


def read_rows(path: str) -> Iterator[Row]:
    """All rows of a file.

    Raises:
        InputError: the file is missing, empty, damaged or of an unknown kind, or a line is not a JSON object.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give the path of a .jsonl or .parquet file")
    if path.endswith(".parquet"):
        rows = _parquet_rows(path)
    elif path.endswith((".jsonl", ".jsonl.gz")):
        rows = _json_rows(path)
    else:
        raise InputError(f"{path}: unknown kind of file; use .jsonl, .jsonl.gz or .parquet")
    number = 0
    try:
        for row in rows:
            number = row.number
            yield row
    except (OSError, EOFError, zlib.error) as error:
        where = f" after row {number}" if number else ""
        raise InputError(f"{path}: cannot be read{where} ({first_line(error)}); copy or write it again") from None
    if number == 0:
        raise InputError(f"{path}: no rows in it")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_of(value: Any) -> str:
    """What ``value`` is, for messages."""
    names = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "text" if isinstance(value, str) else type(value).__name__)


def one_line(text: str, most: int = 500) -> str:
    """``text`` as part of a message: of a value that is long, or holds line breaks, the beginning and the end."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def check_unicode(what: str, value: Any) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer, file or request can take."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowError(f"its {what} holds \\u{code:04x}, half of a character (a lone surrogate); fix the row") from None


# --- JSON lines -----------------------------------------------------------------------------------------------


def _json_rows(path: str) -> Iterator[Row]:
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        # Bytes that are no UTF-8 become surrogates, so that the line they stand in can be named.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
        first = text.buffer.peek(4)[:4]
        for magic, what in _OTHER_KINDS.items():
            if first.startswith(magic):
                raise InputError(f"{path}: this is {what}")
        for number, line in enumerate(text, 1):
            if line.strip():
                yield Row(path, number, _parse(line, f"{path} row {number}"))


def _parse(line: str, place: str) -> dict[str, Any]:
    """The JSON object in ``line``."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - 0xDC00
        raise InputError(f"{place}: byte 0x{byte:02x} is no UTF-8; save the file as UTF-8") from None
    if "\0" in line:
        raise InputError(f"{place}: zero bytes, as in UTF-16 text; save the file as UTF-8")
    try:
        fields = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON ({error.msg}); one JSON object per line") from None
    except RecursionError:
        raise InputError(f"{place}: nested deeper than {DEEPEST} levels; flatten it") from None
    except ValueError as error:  # a key twice, or a number with more digits than Python turns into an integer
        what = first_line(error) if "twice" in str(error) else "a number with thousands of digits; write it as text"
        raise InputError(f"{place}: {what}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{place}: {type(fields).__name__} instead of a JSON object")
    if line.count("[") + line.count("{") > DEEPEST and _depth(fields) > DEEPEST:
        raise InputError(f"{place}: nested deeper than {DEEPEST} levels; flatten it")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice would silently lose its first value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands in it twice; keep one")
    return fields


def _depth(value: Any) -> int:
    level, deepest = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        deepest += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return deepest


# --- parquet --------------------------------------------------------------------------------------------------


def _parquet_rows(path: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                twice = next(n for n in names if names.count(n) > 1)
                raise InputError(f"{path}: two columns are named {twice!r}; keep one")
            for batch in file.iter_batches(batch_size=4096):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(path, number, fields)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        where = f"cannot be read after row {number}" if number else "not a whole parquet file"
        raise InputError(f"{path}: {where} ({first_line(error)}); write it again") from None


def plain(value: Any) -> Any:
    """``value`` of a row as JSON can hold it: a parquet file may have decimals, times and bytes in it, which a recorded
    rollout or a reward's process could not take."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value if value is None or isinstance(value, str | int | float) else str(value)
