"""Rows of .jsonl, .jsonl.gz and .parquet files, with the place of each for error messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.types import InputError


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
        """The value at ``key``; dots go into nested fields; None where there is none."""
        value: Any = self.fields
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_rows(path: str) -> Iterator[Row]:
    """All rows of a file.

    Raises:
        InputError: the file is missing, empty, of an unknown kind, or a line is not a JSON object.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give the path of a .jsonl or .parquet file")
    if path.endswith(".parquet"):
        rows = _parquet_rows(path)
    elif path.endswith((".jsonl", ".jsonl.gz")):
        rows = _json_rows(path)
    else:
        raise InputError(f"{path}: unknown kind of file; use .jsonl, .jsonl.gz or .parquet")
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise InputError(f"{path}: no rows in it")


def _json_rows(path: str) -> Iterator[Row]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path} row {number}: not JSON ({error.msg}); one JSON object a line") from None
            if not isinstance(fields, dict):
                raise InputError(f"{path} row {number}: {type(fields).__name__} instead of a JSON object")
            yield Row(path, number, fields)


def _parquet_rows(path: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(path, number, fields)
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a whole parquet file ({str(error).splitlines()[0]})") from None
