"""Files of Hugging Face checkpoints: read where they are wanted, checked on the way, written as others read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_dapo.types import InputError
from megatron_dapo.weights import hf_io
from megatron_dapo.weights.hf_io import HfReader, HfWriter, whole_or_not_at_all, write_index

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces even of small tensors."""
    monkeypatch.setattr(hf_io, "CHECKED", 64)
    monkeypatch.setattr(hf_io, "STAGED", 200)


def reader_of(folder: Path, **tensors: torch.Tensor) -> HfReader:
    save_file(tensors, folder / "model.safetensors")
    return HfReader(str(folder))


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_any_part_lands_in_any_memory(tmp_path, source, target):
    x = torch.randn(24, 10).to(source)
    reader = reader_of(tmp_path, x=x)
    for part in ((slice(0, 24), slice(0, 10)), (slice(6, 18), slice(0, 10)), (slice(0, 24), slice(3, 7))):
        want = x[part].to(target)
        whole = torch.full_like(want, torch.nan)
        reader.read_into(whole, "x", (24, 10), part)
        assert torch.equal(whole, want)
        by_group = torch.full((4, 2 * len(want) // 4, want.size(1)), 7.0, dtype=target)  # every other run of rows
        place = by_group[:, : len(want) // 4]
        reader.read_into(place, "x", (24, 10), part)
        assert torch.equal(place.flatten(0, 1), want) and (by_group[:, len(want) // 4 :] == 7).all()


def test_a_vector_lands_in_a_column_and_in_an_empty_place(tmp_path):
    reader = reader_of(tmp_path, x=torch.arange(12.0))
    matrix = torch.zeros(12, 3)
    reader.read_into(matrix[:, 1], "x", (12,))
    assert torch.equal(matrix[:, 1], torch.arange(12.0)) and not matrix[:, [0, 2]].any()
    reader.read_into(torch.empty(0), "x", (12,), (slice(12, 12),))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_nan_and_no_infinity_comes_in_at_any_place(tmp_path, dtype, bad):
    out = torch.empty(50, 3, dtype=dtype)
    for at in (0, 31, 32, 75, 149):
        x = torch.randn(150).to(dtype)
        x[at] = bad
        with pytest.raises(InputError, match="tensor x holds NaN or infinity"):
            reader_of(tmp_path, x=x.view(50, 3)).read_into(out, "x", (50, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_smallest_numbers_come_in(tmp_path, dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([info.max, info.min, info.tiny, -info.tiny, info.smallest_normal, 0.0, -0.0], dtype=dtype)
    out = torch.empty_like(x)
    reader_of(tmp_path, x=x).read_into(out, "x", x.shape)
    assert torch.equal(out, x) and torch.equal(out.signbit(), x.signbit())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, (99).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"\xff}", (2).to_bytes(8, "little") + b"{}\0", b"\xff" * 20,
        *(len(text).to_bytes(8, "little") + text for text in (
            b'{"x":3}', b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"[" * 20_000,
            b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0]}}', b'{"x":{"dtype":"F32","shape":[1]}}', b"null",
            b'{"x":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}',
        )),
    ],
)  # fmt: skip
def test_what_is_no_whole_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="model.safetensors: not a whole safetensors file") as caught:
        HfReader(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_shape_that_contradicts_the_bytes_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InputError, match="contradicts"):
        HfReader(str(tmp_path))


def written(folder: Path, tensors: dict[str, torch.Tensor], parts: int = 1) -> None:
    """``tensors`` as several ranks write them."""
    where, total, names = {}, 0, list(tensors)
    for part in range(parts):
        mine = names[part::parts]
        writer = HfWriter(folder, f"{part:05d}", [(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in mine])
        for name in mine:
            writer.add(name, tensors[name])
        writer.flush()
        where, total = where | writer.where, total + writer.total
    write_index(folder, where, total)


@pytest.mark.parametrize(("shard_bytes", "parts"), [(1000, 1), (2**30, 3), (2**30, 1), (1000, 2)])
def test_what_is_written_is_read_by_safetensors_under_transformers_names(tmp_path, monkeypatch, shard_bytes, parts):
    monkeypatch.setattr(hf_io, "SHARD_BYTES", shard_bytes)
    tensors = {f"layer.{n}": torch.randn(5, n + 1).to(DTYPES[n % 4]) for n in range(20)}
    tensors["turned"] = torch.randn(6, 4).T
    written(tmp_path, tensors, parts)
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    index = tmp_path / "model.safetensors.index.json"
    if (shard_bytes, parts) == (2**30, 1):
        assert [file.name for file in files] == ["model.safetensors"] and not index.exists()
    else:
        count = len(files)
        assert count >= parts and [f.name for f in files] == [
            f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
        ]
        where = json.loads(index.read_text())["weight_map"]
        assert where == {name: file.name for file in files for name in load_file(file)}
    for file in files:
        length = int.from_bytes(file.read_bytes()[:8], "little")
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"} and length % 8 == 0
            assert length < 50 + 100 * len(opened.keys())  # no more than it takes
    reader, out = HfReader(str(tmp_path)), torch.empty(4, 6)
    reader.read_into(out, "turned", (4, 6))
    assert torch.equal(out, tensors["turned"])


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{}", "null", "3", '"x"', "", "{", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"x": 3}}',
        '{"weight_map": {"x": "../other/model.safetensors"}}', "[" * 100_000, "\ufeff{}",
    ],
    ids=lambda content: content[:30],
)  # fmt: skip
def test_an_index_that_is_none_is_one_line(tmp_path, content):
    save_file({"x": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match="model.safetensors.index.json") as caught:
        HfReader(str(tmp_path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_the_one_file_wins_over_an_index_as_in_transformers(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"x": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    out = torch.empty(2)
    HfReader(str(tmp_path)).read_into(out, "x", (2,))
    assert torch.equal(out, torch.ones(2))


@pytest.mark.parametrize(
    ("tensors", "tied", "words"),
    [
        ({"model.embed_tokens.weight": torch.ones(3, 2)}, True, None),
        ({"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": torch.ones(3, 2)}, True, None),
        ({"model.embed_tokens.weight": torch.ones(3, 2), "model.rotary_emb.inv_freq": torch.ones(1)}, True, None),
        ({"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": torch.zeros(3, 2)}, True, "has another one"),
        (
            {"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": torch.ones(3, 2)},
            False,
            "lm_head.weight: the",
        ),
        ({"model.embed_tokens.weight": torch.ones(3, 2), "a": torch.ones(1), "b": torch.ones(1)}, True, "a and 1 more"),
        ({"model.embed_tokens.weight": torch.ones(2, 2)}, True, r"is \[2, 2\], config.json makes it \[3, 2\]"),
        ({"other": torch.ones(2, 2)}, True, "tensor model.embed_tokens.weight is missing"),
    ],
)
def test_names_and_shapes_are_compared_before_anything_is_read(tmp_path, tensors, tied, words):
    save_file(tensors, tmp_path / "model.safetensors")
    reader = HfReader(str(tmp_path))
    expected = {"model.embed_tokens.weight": (3, 2)}
    if words is None:
        reader.check(expected, tied)
        return
    with pytest.raises(InputError, match=words):
        reader.check(expected, tied)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match="tensor x is in a.safetensors as well"):
        HfReader(str(tmp_path))


def export(target: Path, text: str = "new", fails: bool = False) -> None:
    with whole_or_not_at_all(target, owner=True) as draft:
        (draft / "file").write_text(text)
        assert not fails


@pytest.mark.parametrize("left", ["a folder", "a file"])
@pytest.mark.parametrize("end", [".old", ".unfinished"])
@pytest.mark.parametrize("before", [True, False])
def test_what_an_export_that_was_cut_off_left_stops_no_other(tmp_path, capsys, before, end, left):
    """Killed at any place: between any two of its moves lie these files. The folder before it is never lost."""
    target, other = tmp_path / "step_4", tmp_path / f"step_4{end}"
    if before:
        target.mkdir()
        (target / "file").write_text("before")
    if left == "a file":
        other.write_text("left")
    else:
        other.mkdir()
        (other / "file").write_text("left")
    with pytest.raises(AssertionError):
        export(target, fails=True)
    assert "step_4" in capsys.readouterr().err
    if before:
        assert (target / "file").read_text() == "before"
    elif end == ".old" and left == "a folder":
        assert (target / "file").read_text() == "left"  # it was the folder, moved aside
    for _ in range(2):
        export(target)
        assert (target / "file").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["step_4"]
    assert not capsys.readouterr().err
