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
from megatron_dapo.weights.hf_io import HfReader, HfWriter, write_index

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
        (2).to_bytes(8, "little") + b"\xff}", (2).to_bytes(8, "little") + b"{}\0",
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


@pytest.mark.parametrize("limit", [("SHARD_BYTES", 1000), ("HEADER_ROOM", 1000)], ids=lambda limit: limit[0])
def test_what_is_written_is_read_by_safetensors(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(hf_io, *limit)
    tensors = {f"layer.{n}": torch.randn(5, n + 1).to(DTYPES[n % 4]) for n in range(20)}
    tensors["turned"] = torch.randn(6, 4).T
    writer = HfWriter(tmp_path, "00000")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.flush()
    write_index(tmp_path, writer.where, writer.total)
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and found.keys() == tensors.keys() == writer.where.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(writer.where[name] == file.name for file in files for name in load_file(file))
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    reader, out = HfReader(str(tmp_path)), torch.empty(4, 6)
    reader.read_into(out, "turned", (4, 6))
    assert torch.equal(out, tensors["turned"])
