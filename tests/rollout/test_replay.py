"""Recorded rollouts come back bit for bit, or not at all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.rollout.replay import available_steps, dump_rollouts, load_rollouts, load_step, step_file
from megatron_dapo.types import Group, InputError, Prompt, Sample


def some_groups(count: int = 3) -> list[Group]:
    draws = np.random.default_rng(3)
    groups = []
    for order in range(count):
        extra = {"index": order, "nested": {"level": ["a", 1.5, None]}}
        prompt = Prompt(f"row-{order}", "Wie viel ist 3 − 1?\n\n", (1, 2, 151_935), "2", "math", extra)
        samples = []
        for i in range(4):
            length = int(draws.integers(1, 30))
            samples.append(
                Sample(
                    token_ids=draws.integers(0, 152_064, length),
                    logprobs=draws.normal(size=length).astype(np.float32) * np.float32(10.0) ** -i,
                    finish_reason=("stop", "length", "abort", "stop")[i],
                    weight_version=order,
                    text='答案 "2"\t\x1b[31m\u2028 \ud800' * i,
                    score=-1.0 + i / 3,
                    acc=i / 3,
                    prediction=str(i),
                    status=("ok", "no_answer", "timeout", "error")[i],
                    spans=((order - 1, 0, 1), (order, 1, length)) if i == 2 else (),
                )
            )
        groups.append(Group(prompt, samples, 100 + order))
    return groups


def assert_same(ours: list[Group], theirs: list[Group]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt, a.order, len(a.samples)) == (b.prompt, b.order, len(b.samples))
        for one, other in zip(a.samples, b.samples, strict=True):
            for name, value in vars(one).items():
                if isinstance(value, np.ndarray):
                    found = vars(other)[name]
                    assert found.dtype == value.dtype and found.tobytes() == value.tobytes(), name
                else:
                    assert vars(other)[name] == value, name


def test_round_trip_is_exact(tmp_path):
    groups = some_groups()
    folder = tmp_path / "run/rollouts"
    assert dump_rollouts(folder, 12, groups) == folder / "step_000012.jsonl.gz"
    assert_same(load_rollouts(folder, 12), groups)


def test_logprobs_that_decimals_would_spoil(tmp_path):
    group = some_groups(1)[0]
    odd = np.array([0x80000000, 0x00000001, 0x3EAAAAAB, 0xC2F6E979, 0xFF800000], dtype=np.uint32)
    group.samples = group.samples[:1]
    group.samples[0].logprobs, group.samples[0].token_ids = odd.view(np.float32), np.arange(5)
    dump_rollouts(tmp_path, 0, [group])
    assert load_rollouts(tmp_path, 0)[0].samples[0].logprobs.view(np.uint32).tolist() == odd.tolist()


def test_what_is_loaded_may_be_written_to(tmp_path):
    dump_rollouts(tmp_path, 0, some_groups(1))
    load_rollouts(tmp_path, 0)[0].samples[0].logprobs[0] = 1.0


def test_a_step_without_groups(tmp_path):
    dump_rollouts(tmp_path, 3, [])
    assert load_rollouts(tmp_path, 3) == []


def test_numpy_values_in_extra_fields(tmp_path):
    group = some_groups(1)[0]
    group.prompt.extra.update(index=np.int64(3), grid=np.arange(2))
    dump_rollouts(tmp_path, 0, [group])
    assert load_rollouts(tmp_path, 0)[0].prompt.extra["grid"] == [0, 1]


def test_the_file_reads_like_text(tmp_path):
    path = dump_rollouts(tmp_path, 0, some_groups(2))
    lines = gzip.decompress(path.read_bytes()).decode("utf-8", "surrogatepass").split("\n")
    first = json.loads(lines[0])
    assert first["prompt"]["text"] == "Wie viel ist 3 − 1?\n\n" and "答案" in lines[0]
    assert len(lines) == 3 and len(first["samples"]) == 4
    assert all(isinstance(i, int) for i in first["samples"][0]["token_ids"])


def test_steps_that_are_there(tmp_path):
    assert available_steps(tmp_path / "absent") == []
    for step in (3, 12, 1_000_000):
        dump_rollouts(tmp_path, step, [])
    (tmp_path / "notes.txt").write_text("not a step")
    assert available_steps(tmp_path) == [3, 12, 1_000_000]


def test_the_last_step_is_read_where_none_is_named(tmp_path):
    for step, groups in ((3, some_groups(1)), (12, some_groups(2)), (7, some_groups(3))):
        dump_rollouts(tmp_path / "run/rollouts", step, groups)
    for folder in ("run", "run/rollouts"):
        step, groups = load_step(tmp_path / folder)
        assert (step, len(groups)) == (12, 2)
        assert load_step(tmp_path / folder, 7)[0] == 7
    with pytest.raises(InputError, match="no dumped rollouts there"):
        load_step(tmp_path / "elsewhere")


def test_a_dump_replaces_the_older_one_and_leaves_nothing_else(tmp_path):
    dump_rollouts(tmp_path, 0, some_groups(3))
    dump_rollouts(tmp_path, 0, some_groups(1))
    assert len(load_rollouts(tmp_path, 0)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000.jsonl.gz"]


def test_a_dump_that_dies_leaves_the_older_one(tmp_path):
    dump_rollouts(tmp_path, 0, some_groups(2))
    broken = some_groups(2)
    broken[1].prompt.extra["what"] = object()
    with pytest.raises(TypeError, match="extra"):
        dump_rollouts(tmp_path, 0, broken)
    assert_same(load_rollouts(tmp_path, 0), some_groups(2))
    assert available_steps(tmp_path) == [0]


def refused(folder: Path, step: int) -> str:
    with pytest.raises(InputError) as raised:
        load_rollouts(folder, step)
    line = str(raised.value)
    assert "\n" not in line and str(step_file(folder, step)) in line
    return line


def test_a_missing_step(tmp_path):
    assert "no steps" in refused(tmp_path / "absent", 0)
    dump_rollouts(tmp_path, 2, [])
    dump_rollouts(tmp_path, 5, [])
    assert "steps 2 .. 5" in refused(tmp_path, 6)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"plain text",
        lambda whole: whole[:60] + bytes(20) + whole[80:],
        lambda whole: gzip.compress(b'{"order": 1}\n'),
        lambda whole: gzip.compress(b"[1, 2]\n"),
        lambda whole: gzip.compress(b'{"order"\n'),
        lambda whole: gzip.compress(b"\xff\xfe\n"),
        lambda whole: gzip.compress(gzip.decompress(whole).replace(b'"token_ids": [', b'"token_ids": [1, ')),
        lambda whole: gzip.compress(gzip.decompress(whole).replace(b'"prediction"', b'"unknown"')),
    ],
    ids=["cut", "empty", "text", "bits", "fields", "list", "json", "utf8", "lengths", "names"],
)
def test_a_file_that_is_not_whole(tmp_path, spoil):
    path = dump_rollouts(tmp_path, 0, some_groups())
    path.write_bytes(spoil(path.read_bytes()))
    refused(tmp_path, 0)
