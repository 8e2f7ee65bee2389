"""The reader of dumped rollouts, as a user runs it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.rollout.replay import dump_rollouts
from megatron_dapo.types import Group, Prompt, Sample

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/inspect_rollouts.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("inspect_rollouts", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def group(order: int, right: list[bool], text: str = "Answer: 7", **fields) -> Group:
    known = {"finish_reason": "stop", "weight_version": 3, "status": "ok", "prediction": "7", **fields}
    ids, logprobs = np.arange(4), np.full(4, -0.25, np.float32)
    samples = [Sample(ids, logprobs, text=text, score=2.0 * r - 1, acc=float(r), **known) for r in right]
    return Group(Prompt(f"row-{order}", f"Problem {order}?", (1,), "7", "math"), samples, order)


@pytest.fixture
def run(tmp_path):
    groups = [
        group(10, [True, True], "all is well\nAnswer: 7"),
        group(11, [False, False], "too long " * 4, finish_reason="length", prediction=""),
        group(12, [True, False], "mixed feelings"),
        group(13, [False, False], "lost", status="timeout"),
    ]
    dump_rollouts(tmp_path / "rollouts", 4, [])
    dump_rollouts(tmp_path / "rollouts", 11, groups)
    return tmp_path


def printed(tool, capsys, *argv) -> str:
    assert tool.main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


def refused(tool, capsys, *argv) -> str:
    assert tool.main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("inspect_rollouts: error: ")
    return err


def test_the_last_step_one_sample_of_each_group_first(tool, capsys, run):
    out = printed(tool, capsys, run)
    summary = "step 11: 4 groups (1 mixed), 8 samples, 37.5% right, mean length 4, 25.0% truncated\n"
    assert out.startswith(summary)
    assert [f"Problem {n}?" in out for n in (10, 11, 12, 13)] == [True, True, True, False]
    assert out.count("── response") == 3


def test_everything_about_a_sample(tool, capsys, run):
    out = printed(tool, capsys, run / "rollouts", "--step", "11", "--num", "1", "--only", "truncated")
    for words in (
        "group 11 | math | row-11 | 0 of 2 right | sample 1",
        "  Problem 11?",
        "  too long too long",
        "── wrong: predicted nothing, answer '7'",
        "score -1 | acc 0 | status ok | 4 tokens | finish length | mean log-prob -0.250 | weights 3",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("only", "orders"),
    [("right", [10, 12, 10]), ("wrong", [11, 12, 11]), ("mixed", [12, 12]), ("truncated", [11, 11])],
)
def test_only(tool, capsys, run, only, orders):
    out = printed(tool, capsys, run, "--num", "9", "--only", only)
    assert [int(line.split()[1]) for line in out.splitlines() if line.startswith("group ")] == orders


def test_a_step_without_groups(tool, capsys, run):
    assert printed(tool, capsys, run, "--step", "4") == "step 4: no groups\nno sample to show\n"


def test_nothing_that_matches(tool, capsys, tmp_path):
    dump_rollouts(tmp_path, 0, [group(0, [True, True])])
    assert "no sample to show with --only wrong" in printed(tool, capsys, tmp_path, "--only", "wrong")


def test_a_long_response_loses_its_middle_unless_asked(tool, capsys, tmp_path):
    text = "\n".join(f"line {i}" for i in range(100))
    dump_rollouts(tmp_path, 0, [group(0, [True], text)])
    short = printed(tool, capsys, tmp_path)
    assert "line 0\n" in short and "line 99\n" in short and "... 80 lines" in short and "line 50" not in short
    assert "line 50\n" in printed(tool, capsys, tmp_path, "--full")


def test_control_characters_do_not_reach_the_terminal(tool, capsys, tmp_path):
    dump_rollouts(tmp_path, 0, [group(0, [True], "\x1b[2J wiped \x07 \u202e", prediction="\x1b]0;t\x07")])
    out = printed(tool, capsys, tmp_path)
    assert "\\x1b[2J wiped \\x07 \\u202e" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_lines_fit_the_width(tool, capsys, tmp_path):
    dump_rollouts(tmp_path, 0, [group(0, [True], "x" * 350 + " word" * 100)])
    assert max(len(line) for line in printed(tool, capsys, tmp_path).splitlines()) <= 100


def test_what_is_refused(tool, capsys, run, tmp_path):
    assert "--dump-rollouts" in refused(tool, capsys, tmp_path / "absent")
    assert "steps 4 .. 11" in refused(tool, capsys, run, "--step", "5")
    assert "--num 0" in refused(tool, capsys, run, "--num", "0")
    (run / "rollouts/step_000012.jsonl.gz").write_bytes(b"junk")
    assert "step_000012" in refused(tool, capsys, run)


def test_from_the_command_line(run):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, str(TOOL)]
    told = subprocess.run([*call, "--help"], capture_output=True, text=True, env=environment, timeout=500)
    assert told.returncode == 0 and "--only {right,wrong,mixed,truncated}" in told.stdout
    bad = subprocess.run([*call, str(run / "x")], capture_output=True, text=True, env=environment, timeout=500)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1
