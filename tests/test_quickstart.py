"""The quick start's task and recipes; the whole of it is run by ``make quickstart``."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import quickstart_task as task
from quickstart_result import main as print_result

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards.registry import judge

EXAMPLES = Path(__file__).parents[1] / "examples"


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    task.make(folder, seed=3, num_warmup=1000, num_train=60, num_heldout=40)
    return folder


def test_no_problem_is_in_two_sets(made):
    sets = [
        [row["question"] for row in rows(made / "train.jsonl")],
        [row["question"] for row in rows(made / "heldout.jsonl")],
        [row["prompt"] for row in rows(made / "warmup.jsonl")],
    ]
    assert [len(set(questions)) for questions in sets] == [60, 40, 1000]
    for one, other in itertools.combinations(sets, 2):
        assert not set(one) & set(other)


def test_answers_are_the_sums_and_totals_stay_small(made):
    for row in rows(made / "train.jsonl") + rows(made / "heldout.jsonl"):
        terms = [int(t) for t in re.findall(r"[+-]?\d+", row["question"])]
        totals = list(itertools.accumulate(terms))
        assert str(totals[-1]) == row["answer"] and min(totals) >= 0 and max(totals) <= task.LARGEST_TOTAL


def test_the_teacher_is_as_careless_as_stated(made):
    """Of those who work it out, a slip a step; of those who answer at once, most are wrong."""
    right = {True: [], False: []}
    for row in rows(made / "warmup.jsonl"):
        terms = [int(t) for t in re.findall(r"[+-]?\d+", row["prompt"])]
        verdict = judge("math", row["response"], str(sum(terms)), {}, RewardOptions())
        assert verdict.status == "ok" and set(row["prompt"] + row["response"]) <= set(task.ALPHABET)
        right[";" in row["response"]].append(verdict.acc)
    worked_out, at_once = right[True], right[False]
    assert len(worked_out) / 1000 == pytest.approx(task.STEPS_SHARE, abs=0.05)
    assert sum(at_once) / len(at_once) == pytest.approx(1 - task.GUESS_WRONG, abs=0.06)
    assert sum(worked_out) / len(worked_out) == pytest.approx((1 - task.STEP_SLIP) ** 3.5, abs=0.06)


def test_the_same_seed_gives_the_same_files(made, tmp_path):
    task.make(tmp_path / "same", seed=3, num_warmup=1000, num_train=60, num_heldout=40)
    task.make(tmp_path / "other", seed=4, num_warmup=1000, num_train=60, num_heldout=40)
    for name in ("train.jsonl", "heldout.jsonl", "warmup.jsonl"):
        assert (made / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
        assert (made / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_the_result_is_the_first_and_the_last_evaluation(tmp_path, capsys, monkeypatch):
    name = "val-core/chain_sum"
    evaluations = {0: (0.2, 0.01, 17.0), 2: (0.4, 0.02, 30.0), 4: (0.625, 0.03, 33.0)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(5):
            row = {"step": number, "actor/lr": 1.0}
            if number in evaluations:
                acc, se, length = evaluations[number]
                row |= {f"{name}/acc/mean@4": acc, f"{name}/acc/se": se, f"{name}/response_length/mean": length}
            file.write(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", ["quickstart_result.py", str(tmp_path)])
    print_result()
    before, after = capsys.readouterr().out.splitlines()
    assert "before DAPO: 0.200 ± 0.010" in before and "17.0 tokens" in before
    assert "after DAPO: 0.625 ± 0.030" in after and "33.0 tokens" in after


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "7", "OMP_THREAD_LIMIT": "1"}])
def test_a_machine_of_several_cores_runs_two_processes_whatever_openmp_is_told(tmp_path, variables):
    """nproc answers OMP_NUM_THREADS where that is set, as make does: one process, with the rounding of one."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    script = shutil.copytree(EXAMPLES, tmp_path / "examples") / "quickstart.sh"
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    printed = subprocess.run(["bash", script], env=plain | variables, check=True, capture_output=True, text=True).stdout
    cores = int(subprocess.run(["nproc"], env=plain, check=True, capture_output=True, text=True).stdout)
    assert re.findall(r"--nproc-per-node (\d+)", printed) == 2 * [str(min(cores, 2))]
