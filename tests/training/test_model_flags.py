"""The lengths that the flags allow against what the model's own files state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.training.arguments import parse
from megatron_dapo.types import InputError

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 100,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


def words(folder: Path, *flags: str, **changed: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN2 | changed))
    return ["--hf-checkpoint", str(folder), "--dry-run", "--rollout-max-prompt-len", "40", *flags]


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_as_many_tokens_as_the_model_has_positions_are_taken_and_one_more_is_not(tmp_path, purpose):
    args, _ = parse(words(tmp_path, "--rollout-max-response-len", "60"), purpose)
    assert args.notes == [] and args.positions == 100
    with pytest.raises(InputError) as caught:
        parse(words(tmp_path, "--rollout-max-response-len", "61"), purpose)
    message = str(caught.value)
    for part in (
        f"{tmp_path}/config.json",
        "100 positions",
        "--rollout-max-response-len 61",
        "101",
        "--allow-longer-context",
    ):
        assert part in message


def test_evaluation_has_its_own_length(tmp_path):
    longer = ("--rollout-max-response-len", "60", "--eval-max-response-len", "61")
    for purpose in ("train", "evaluate"):
        with pytest.raises(InputError, match="--eval-max-response-len 61 = 101 tokens"):
            parse(words(tmp_path, *longer), purpose)
    shorter = ("--rollout-max-response-len", "61", "--eval-max-response-len", "60")
    parse(words(tmp_path, *shorter), "evaluate")


def test_what_yarn_stretches_counts(tmp_path):
    args, _ = parse(words(tmp_path, "--rollout-max-response-len", "360", rope_scaling=YARN, rope_theta=1e4))
    assert args.positions == 400
    with pytest.raises(InputError, match="400 positions"):
        parse(words(tmp_path, "--rollout-max-response-len", "361", rope_scaling=YARN, rope_theta=1e4))


def test_a_longer_context_can_be_allowed_and_is_said(tmp_path, capsys):
    from megatron_dapo.__main__ import main

    given = words(tmp_path, "--rollout-max-response-len", "61", "--allow-longer-context")
    assert main(["plan", *given]) == 0
    out = capsys.readouterr().out
    assert "the model has 100 positions\n" in out and "# " in out and "= 101 tokens" in out.partition("note: ")[2]


@pytest.mark.parametrize(("stated", "said"), [(99, True), (100, False), (1e30, False), ("x", False), (None, False)])
def test_what_the_tokenizer_states_is_said(tmp_path, stated, said):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    given = words(tmp_path, "--rollout-max-response-len", "60", "--tokenizer-model", str(tmp_path))
    notes = parse(given)[0].notes
    assert [f"{tmp_path}/tokenizer_config.json: model_max_length is 99" in note for note in notes] == [True] * said


def test_a_conversion_has_no_lengths(tmp_path):
    assert parse(words(tmp_path), "convert")[0].notes == []
