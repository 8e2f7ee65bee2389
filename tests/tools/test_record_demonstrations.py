"""Demonstrations become recorded rollouts that the trainer can read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from record_demonstrations import main

from megatron_dapo.config import Options
from megatron_dapo.data.tokenizer import load_tokenizer, write_character_tokenizer
from megatron_dapo.rollout.replay import load_rollouts
from megatron_dapo.rollout.trajectories import build_trajectories

DEMONSTRATIONS = [("1+1=", "2"), ("2+3=", "2+3=5"), ("4-4=", "0"), ("9=", "9"), ("7-1=", "6")]


def run(folder: Path, rows: list[dict[str, object]], *flags: str) -> int:
    write_character_tokenizer(folder / "tokenizer", "0123456789+-=")
    (folder / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--demonstrations", str(folder / "demos.jsonl"), "--tokenizer-model", str(folder / "tokenizer")]
    return main([*argv, "--out", str(folder / "out"), *flags])


def good_rows() -> list[dict[str, object]]:
    return [{"prompt": prompt, "response": response} for prompt, response in DEMONSTRATIONS]


def test_every_demonstration_is_a_right_sample_closed_by_end_of_text(tmp_path, capsys):
    assert run(tmp_path, good_rows(), "--rollouts", "2", "--batch", "5") == 0
    assert "2 steps of 5 demonstrations" in capsys.readouterr().out
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    steps = [load_rollouts(tmp_path / "out", step) for step in range(2)]
    for groups in steps:
        assert sorted((g.prompt.text, g.samples[0].text) for g in groups) == sorted(DEMONSTRATIONS)
        for group in groups:
            (sample,) = group.samples
            assert sample.token_ids.tolist() == [*tokenizer.encode(sample.text), tokenizer.end_of_text]
            assert (sample.score, sample.acc, sample.status) == (1.0, 1.0, "ok") and np.isnan(sample.logprobs).all()
    first, second = ([g.prompt.uid for g in groups] for groups in steps)
    assert first != second  # an epoch a step, each in its own order


def test_the_trainer_gives_each_the_weight_of_one(tmp_path):
    run(tmp_path, good_rows(), "--rollouts", "1", "--batch", "5")
    options = Options.from_args(advantage_mean="none", advantage_std="none", overlong_buffer_len=0)
    rows, _ = build_trajectories(load_rollouts(tmp_path / "out", 0), options)
    assert rows.advantages.tolist() == [1.0] * 5 and all(mask.all() for mask in rows.loss_mask)


def test_prompts_are_rendered_as_training_renders_them(tmp_path, capsys):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "response": "2"}]
    assert run(tmp_path, rows, "--rollouts", "1", "--batch", "1", "--chat-template", template) == 0
    assert load_rollouts(tmp_path / "out", 0)[0].prompt.text == "1+1="
    assert run(tmp_path, rows, "--rollouts", "1", "--batch", "1") == 2
    assert "demos.jsonl row 1: chat messages are for a chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1="},
        {"prompt": "1=", "response": 1},
        {"prompt": 1, "response": "1"},
        {"prompt": "1=", "response": "\ud800"},
        {"prompt": "", "response": "1"},
    ],
)
def test_a_row_that_is_no_demonstration(tmp_path, capsys, row):
    assert run(tmp_path, [*good_rows(), row], "--rollouts", "1", "--batch", "5") == 2
    error = capsys.readouterr().err
    assert "demos.jsonl row 6" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
