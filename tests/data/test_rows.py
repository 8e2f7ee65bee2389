"""Files of every kind of damage: rows, or one line that names file, row and reason; never a traceback."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.config import DataOptions
from megatron_dapo.data.prompts import load_prompts
from megatron_dapo.data.rows import Row, plain, read_rows
from megatron_dapo.data.tokenizer import load_tokenizer, write_character_tokenizer
from megatron_dapo.types import InputError

GOOD = '{"question": "caf\u00e9?", "answer": "1"}\n'
ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(500)]


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        list(read_rows(str(path)))
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line
    return line


def deep(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_what_editors_and_windows_write_is_read(tmp_path, encoding, ends, name):
    data = (GOOD + "\n" + GOOD).replace("\n", ends).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    rows = list(read_rows(str(tmp_path / name)))
    assert [(r.number, r.fields) for r in rows] == [(n, {"question": "caf\u00e9?", "answer": "1"}) for n in (1, 3)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (GOOD.encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (GOOD.encode("utf-16-le"), "row 1: byte 0xe9 is no UTF-8"),
        ('{"question": "q"}'.encode("utf-16-le"), "row 1: zero bytes, as in UTF-16 text"),
        ('{"question": "q"}'.encode("utf-16-be"), "row 1: zero bytes, as in UTF-16 text"),
        (GOOD.encode("utf-32"), "UTF-32 text; save it as UTF-8"),
        (
            (GOOD.replace("\u00e9", "e") + GOOD).encode("latin-1"),
            "row 2: byte 0xe9 is no UTF-8; save the file as UTF-8",
        ),
        (GOOD.encode("cp1252"), "row 1: byte 0xe9 is no UTF-8"),
        (b'{"question": "\xed\xa0\x80"}', "row 1: byte 0xed is no UTF-8"),
        (gzip.compress(GOOD.encode(), mtime=0), "gzip data; name it .jsonl.gz"),
        (b"PAR1abc", "parquet data; name it .parquet"),
        (b"PK\x03\x04abc", "a zip archive"),
        (b"", "no rows in it"),
        (b"\n \n", "no rows in it"),
        (b"\xef\xbb\xbf", "no rows in it"),
        (b"{", "row 1: not JSON"),
        (b'[\n{"a": 1}\n]', "row 1: not JSON"),
        (b"null", "row 1: NoneType instead of a JSON object"),
        (b"{} {}", "row 1: not JSON"),
        (b'{"a": 1' + b"7" * 5000 + b"}", "row 1: a number with thousands of digits; write it as text"),
        (deep(65).encode(), "row 1: nested deeper than 64 levels"),
        (deep(2_000).encode(), "row 1: nested deeper than 64 levels"),
        (deep(100_000).encode(), "row 1: nested deeper than 64 levels"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "row 1: nested deeper than 64 levels"),
        (
            b'{"question": "a", "answer": "1", "question": "b"}',
            "row 1: the key 'question' stands in it twice; keep one",
        ),
        (b'{"x": {"a": 1, "a": 1}}', "row 1: the key 'a' stands in it twice"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_is_no_json_lines_is_refused(tmp_path, data, words, zipped):
    path = tmp_path / ("rows.jsonl.gz" if zipped else "rows.jsonl")
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert words in refused(path)


def test_nesting_that_data_has_is_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text(deep(64) + "\n" + '{"a": [' + ", ".join(["[]"] * 500) + "]}")
    assert len(list(read_rows(str(tmp_path / "rows.jsonl")))) == 2


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode()))
    return path


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, name, share):
    path = write(tmp_path, name)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refused(path)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), size=st.integers(1, 40), byte=st.integers(0, 255))
def test_a_damaged_file_is_rows_or_a_refusal(tmp_path, name, place, size, byte):
    path = write(tmp_path, name)
    data = bytearray(path.read_bytes())
    start = int(place * len(data))
    data[start : start + size] = bytes([byte]) * len(data[start : start + size])
    path.write_bytes(bytes(data))
    try:
        list(read_rows(str(path)))
    except InputError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("data", [b"", b"x", b"not that at all", GOOD.encode()])
def test_another_kind_of_file_under_this_name_is_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    refused(tmp_path / name)


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["answer", "answer"]), tmp_path / "x.parquet"
    )
    assert "two columns are named 'answer'" in refused(tmp_path / "x.parquet")


def test_columns_of_every_kind_become_what_json_holds(tmp_path):
    when = datetime.datetime(2024, 2, 29, 1, 2, 3)
    extra = {
        "price": decimal.Decimal("7.5"), "count": decimal.Decimal("3.00"), "when": when, "day": when.date(),
        "time": when.time(), "lasting": datetime.timedelta(seconds=5), "raw": b"ab", "list": [1, None], "index": 4,
    }  # fmt: skip
    table = pa.table(
        {
            "question": pa.array(["q1", "q2"]).dictionary_encode(),
            "answer": pa.array([decimal.Decimal("72.50"), decimal.Decimal("3")], pa.decimal128(9, 2)),
            "extra_info": pa.array([extra, None]),
            "pairs": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    write_character_tokenizer(tmp_path, "q12")
    options = DataOptions(prompt_template="none")
    first, second = load_prompts([str(tmp_path / "rows.parquet")], options, load_tokenizer(str(tmp_path)))
    assert (first.text, first.answer, second.answer) == ("q1", "72.50", "3.00")
    assert first.extra == {
        "price": 7.5, "count": 3, "when": "2024-02-29T01:02:03", "day": "2024-02-29", "time": "01:02:03",
        "lasting": "0:00:05", "raw": "ab", "list": [1, None], "index": 4,
    }  # fmt: skip
    assert json.loads(json.dumps(first.extra)) == first.extra


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_decimals_that_are_no_numbers_become_floats(number):
    assert repr(plain(decimal.Decimal(number))) == repr(float(number))


def test_paths_go_into_objects_and_lists_and_names_with_dots_come_first():
    row = Row("x", 1, {"a": {"b": [{"c": 1}]}, "a.b": 2, "n": None})
    assert [row.get(k) for k in ("a.b", "a", "a.b.0.c", "a.c", "n", "n.x", "z")] == [
        2,
        {"b": [{"c": 1}]},
        1,
        *[None] * 4,
    ]
