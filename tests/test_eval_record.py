"""Every evaluation has its own name and folder, and its report holds what repeats it."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import Options
from megatron_dapo.eval_record import EvalRecord, check_name, default_name, describe_setup
from megatron_dapo.evaluation import ProblemResult, summarise, write_report
from megatron_dapo.types import InputError, Prompt

WEIGHTS = {"path": "runs/x/checkpoints", "iteration": 4}


def setup_of(
    folder: Path, text: str = "rows", ids: tuple[int, ...] = (3, 4), stop: tuple[int, ...] = (1, 2), **given: Any
):
    """The setup of an evaluation on two problems of a file with ``text`` in it."""
    file = folder / "aime.jsonl"
    file.write_text(text)
    args = Namespace(
        seed=given.pop("seed", 7), bf16=given.pop("bf16", False), world_size=1, tokenizer_model="tok", run_dir=str(folder),
        eval_name=None,
    )  # fmt: skip
    options = Options.from_args(eval_prompt_data=[str(file)], **given)
    prompts = [Prompt("a", "q", ids, "1", "aime"), Prompt("b", "q", (5,), "2", "gsm8k")]
    return {**describe_setup(args, options, prompts, stop), "checkpoint": given.pop("weights", WEIGHTS)}


def test_a_setup_holds_all_that_repeats_an_evaluation(tmp_path):
    setup = setup_of(
        tmp_path, eval_temperature=0.6, eval_top_p=0.9, eval_top_k=20, n_samples_per_eval_prompt=8,
        eval_max_response_len=99, verifier_mode="verl_compat", prompt_template="none",
    )  # fmt: skip
    digest = hashlib.sha256(b"rows").hexdigest()
    assert setup["data"] == [{"path": str(tmp_path / "aime.jsonl"), "sha256": digest}]
    assert setup["problems"] == {"all": 2, "aime": 1, "gsm8k": 1}
    assert setup["sampling"] == {
        "samples_per_problem": 8, "max_tokens": 99, "temperature": 0.6, "top_p": 0.9, "top_k": 20,
        "stop_token_ids": (1, 2), "seed": 7, "engine": "embedded", "precision": "fp32",
    }  # fmt: skip
    assert setup["reward"]["by_source"] == {"aime": "math", "gsm8k": "math"}
    assert setup["reward"]["verifier_mode"] == "verl_compat"
    assert setup["prompts"]["prompt_template"] == "none" and setup["prompts"]["tokenizer"] == "tok"
    assert {"megatron_dapo", "python", "torch", "megatron-core"} <= setup["versions"].keys()
    assert setup["command"].startswith("python -m megatron_dapo") and Path(setup["directory"]).is_dir()


CHANGES: list[dict[str, Any]] = [
    {"text": "other rows"}, {"ids": (3, 5)}, {"stop": (1,)}, {"seed": 8}, {"bf16": True}, {"eval_temperature": 0.9},
    {"eval_top_p": 1.0}, {"eval_top_k": 5}, {"n_samples_per_eval_prompt": 2}, {"eval_max_response_len": 9},
    {"reward": "reasoning_gym"}, {"verifier_mode": "verl_compat"}, {"prompt_template": "none"}, {"reward_timeout_s": 1.0},
    {"rollout_engine": "sglang"}, {"weights": {"path": "runs/x/checkpoints", "iteration": 5}},
    {"weights": {"path": "models/qwen", "iteration": None}},
]  # fmt: skip


def test_evaluations_that_differ_in_anything_have_different_names(tmp_path):
    names = [default_name(setup_of(tmp_path, **dict(change))) for change in [{}, *CHANGES]]
    assert len(set(names)) == len(names)
    assert names[0].startswith("aime-step_000004-") and names[-1].startswith("aime-qwen-")
    again = {**setup_of(tmp_path), "command": "another", "directory": "/", "versions": {}, "processes": 8}
    assert default_name(again) == names[0]  # circumstances do not count


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_name_of_another_evaluation_is_refused_with_the_difference(tmp_path, change):
    report = summarise([ProblemResult("a", "aime", (1.0,), ("1",), (3,), 0, 0)], k=1)
    write_report(report, tmp_path, 4, setup_of(tmp_path), "mine")
    check_name("mine", tmp_path, setup_of(tmp_path))
    check_name("other", tmp_path, setup_of(tmp_path, **dict(change)))
    with pytest.raises(InputError, match="--eval-name mine: .* is another evaluation") as refused:
        check_name("mine", tmp_path, setup_of(tmp_path, **dict(change)))
    assert " there and " in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("there", ['{"step": 4, "k": 32}', "[]", "{", ""])
def test_what_holds_no_setup_is_another_evaluation(tmp_path, there):
    path = tmp_path / "eval/mine/report.json"
    path.parent.mkdir(parents=True)
    path.write_text(there)
    with pytest.raises(InputError, match="--eval-name mine"):
        check_name("mine", tmp_path, setup_of(tmp_path))


def report_of(acc: float, prediction: str = "1"):
    return summarise([ProblemResult("a", "aime", (acc,), (prediction,), (3,), 0, 0)], k=1)


def test_nothing_is_written_over(tmp_path):
    """The same evaluation with the same result takes its folder again; whatever differs is put beside it."""
    setup = setup_of(tmp_path)
    kept: dict[Path, bytes] = {}
    for report, given, name, expected in (
        (report_of(1.0), setup, None, "step_000004"),
        (report_of(1.0), {**setup, "command": "resumed"}, None, "step_000004"),
        (report_of(0.0), setup, None, "step_000004-2"),
        (report_of(1.0), setup_of(tmp_path, eval_top_k=3), None, "step_000004-3"),
        (report_of(0.0), setup, None, "step_000004-2"),
        (report_of(1.0), setup, "mine", "mine"),
        (report_of(0.0), setup, "mine", "mine-2"),
    ):
        folder = write_report(report, tmp_path, 4, given, name)
        assert folder == tmp_path / "eval" / expected
        content = json.loads((folder / "report.json").read_text())
        assert content["overall"]["mean"] == report.overall.mean
        assert content["setup"]["sampling"]["top_k"] == given["sampling"]["top_k"]
        kept[folder] = (folder / "report.json").read_bytes()
    assert len(kept) == 5 and all((folder / "report.json").read_bytes() == content for folder, content in kept.items())


def test_a_report_can_be_read_whatever_was_predicted(tmp_path):
    source = "pipe|\ud800"
    report = summarise([ProblemResult("a", source, (0.0,), ("\ud800é",), (3,), 0, 0)], k=1)
    folder = write_report(report, tmp_path, 1, {**setup_of(tmp_path), "command": "a | b"})
    assert json.loads((folder / "report.json").read_text())["results"][0]["predictions"] == ["\ud800é"]
    text = (folder / "report.md").read_text()
    assert (
        "| sampling.temperature | 1.0 |" in text
        and "| command | a \\| b |" in text
        and "| checkpoint.iteration | 4 |" in text
    )


def test_the_record_of_training_follows_the_step_and_that_of_eval_has_a_name(tmp_path):
    base = {name: value for name, value in setup_of(tmp_path).items() if name != "checkpoint"}
    args = Namespace(run_dir=str(tmp_path), eval_name=None)
    training = EvalRecord(args, base, None)
    assert training.name is None and training.folder == tmp_path
    assert training.setup(3)["checkpoint"] == {"path": str(tmp_path), "iteration": 3, "in_training": True}
    alone = EvalRecord(args, base, WEIGHTS)
    assert alone.name == default_name(setup_of(tmp_path)) and alone.folder == tmp_path / "eval" / alone.name
    assert alone.setup(0)["checkpoint"] == WEIGHTS
    args.eval_name = "mine"
    assert EvalRecord(args, base, WEIGHTS).folder == tmp_path / "eval/mine"
