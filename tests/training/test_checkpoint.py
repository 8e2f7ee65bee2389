"""Weights that are asked for and not there, or not whole: refused by name before a model is built."""

from __future__ import annotations

import functools
import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from distributed_helper import run_ranks
from hf_models import save_model
from tiny import write_task

from megatron_dapo import loop
from megatron_dapo.config import Options
from megatron_dapo.data.problems import load_problems
from megatron_dapo.training import checkpoint
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.types import InputError

SHORT = ("--rollout-max-prompt-len", "32", "--rollout-max-response-len", "32")
"""The models here have 64 positions."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run's checkpoint (run/checkpoints), a recipe, and a Hugging Face checkpoint of the same kind (hf)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    recipe = write_task(folder, run_dir=str(folder / "run"))
    run_ranks(lambda: checkpoint.save(build_trainer(*parse([str(recipe)])), 2, None), 1)
    save_model(folder / "hf", "qwen2")
    return folder


def arguments(folder: Path, *words: str) -> tuple[Any, Options]:
    return parse([str(folder / "recipe.toml"), "--run-dir", str(folder / "new"), *words])


def check(made: Path, **changed: Any) -> Any:
    """The recipe's arguments with some ``changed``, looked at."""
    args = Namespace(**{**vars(made_arguments(made)), **changed})
    checkpoint.check_checkpoints(args)
    return args


@functools.cache
def made_arguments(made: Path) -> Namespace:
    return arguments(made)[0]


def refused(made: Path, **changed: Any) -> str:
    with pytest.raises(InputError) as caught:
        check(made, **changed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def copied(made: Path, folder: Path) -> Path:
    return Path(shutil.copytree(made, folder / "copy"))


def test_what_is_whole_is_taken(made):
    saved = str(made / "run/checkpoints")
    assert checkpoint.has_checkpoint(check(made, save=saved).save)
    check(made, load=saved)
    check(made, load=saved, ckpt_step=2)
    check(made, ref_load=saved, kl_coef=0.1)
    check(made)  # random weights, where no others are asked for


def test_every_argument_that_is_compared_is_one(made):
    assert all(hasattr(made_arguments(made), name) for name in (*checkpoint.SHAPE, *checkpoint.COMPUTATION))


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--pretrained-checkpoint"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_folder_without_weights_stops_whatever_asks_for_it(made, tmp_path, flag, kl):
    asked = {"kl_coef": kl, "load": str(made / "run/checkpoints")}
    name = flag[2:].replace("-", "_")
    assert f"{flag} {tmp_path}/none: no checkpoint there" in refused(made, **asked | {name: f"{tmp_path}/none"})
    (tmp_path / "config.json").write_text((made / "hf/config.json").read_text())
    assert f"{flag} {tmp_path}: no safetensors there" in refused(made, **asked | {name: str(tmp_path)})


@pytest.mark.parametrize("other", [None, "pytorch_model.bin"])
def test_a_hugging_face_folder_without_safetensors_does_not_train_from_random_weights(made, tmp_path, other):
    for name in ("config.json",):
        (tmp_path / name).write_text((made / "hf" / name).read_text())
    if other:
        (tmp_path / other).write_text("")
    words = ["--hf-checkpoint", str(tmp_path), "--run-dir", str(tmp_path / "run"), *SHORT]
    args, _ = parse(words)
    with pytest.raises(InputError, match=f"--hf-checkpoint {tmp_path}: .*{other or 'no safetensors there'}"):
        checkpoint.choose_checkpoint(args)
    assert parse([*words, "--dry-run"])[0].dry_run  # a plan needs none
    args, _ = parse([*words, "--load", str(made / "hf")])
    checkpoint.choose_checkpoint(args)
    assert args.load_hf == str(made / "hf")


def index_of(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: index_of(f, []), "index.json: holds no weight_map"),
        (lambda f: index_of(f, {}), "index.json: holds no weight_map"),
        (lambda f: index_of(f, {"weight_map": {"x": "gone.safetensors"}}), "shard gone.safetensors is missing"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 40), "not a whole safetensors file"),
    ],
)
def test_a_damaged_hugging_face_checkpoint_is_seen_before_a_model_is_built(made, tmp_path, damage, words):
    folder = copied(made, tmp_path)
    damage(folder / "hf")
    args, _ = parse(["--hf-checkpoint", str(folder / "hf"), "--run-dir", str(tmp_path / "run"), *SHORT])
    with pytest.raises(InputError, match=words) as caught:
        checkpoint.check_checkpoints(args)
    assert "\n" not in str(caught.value)


def scribble(file: Path) -> None:
    """Other bytes, as many."""
    file.write_bytes(b"\7" * file.stat().st_size)


@pytest.mark.parametrize("asked", ["save", "load"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("7"), "iter_0000007.*iter_0000002 there"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text(""), "holds '', no iteration"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("two"), "holds 'two', no iteration"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe"), "no iteration"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("-3"), "holds '-3', no iteration"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("release"), "names release"),
        (lambda f: next(f.rglob("*.distcp")).unlink(), "distcp is missing or incomplete"),
        (lambda f: next(f.rglob("*.distcp")).write_bytes(b"short"), "distcp is missing or incomplete"),
        (lambda f: (f / "iter_0000002/.metadata").write_bytes(b"no pickle"), ".metadata is missing or incomplete"),
        (lambda f: scribble(next(f.rglob("*.distcp"))), r"iter_0000002 cannot be read \(.*iter_0000002 there"),
        (lambda f: (f / "iter_0000002/.metadata").unlink(), ".metadata is missing"),
        (lambda f: (f / "iter_0000002/metadata.json").unlink(), "metadata.json is missing"),
        (lambda f: shutil.rmtree(f / "iter_0000002"), r"iter_0000002, .*\(none there\)"),
    ],
)
def test_a_megatron_checkpoint_that_is_not_whole_is_named(made, tmp_path, asked, damage, words):
    folder = copied(made, tmp_path)
    damage(folder / "run/checkpoints")
    said = refused(made, **{asked: str(folder / "run/checkpoints")})
    assert re.search(words, said) and said.startswith(f"--{asked} ")


def test_a_step_that_is_not_there_and_a_missing_rollout_state_are_named(made, tmp_path):
    saved = copied(made, tmp_path) / "run/checkpoints"
    assert "--ckpt-step says iter_0000009" in refused(made, load=str(saved), ckpt_step=9)
    shutil.rmtree(saved / "rollout_state")
    assert "rollout_state/iter_0000002.pt: missing" in refused(made, save=str(saved))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_base", 5000),
        ("layernorm_epsilon", 1e-3),
        ("rotary_percent", 0.5),
        ("kv_channels", 8),
        ("use_rope_scaling", True),
    ],
)
def test_a_checkpoint_of_another_computation_is_refused(made, name, value):
    said = refused(made, load=str(made / "run/checkpoints"), **{name: value})
    assert (
        f"that model has --{name.replace('layernorm', 'norm').replace('_', '-')} " in said
        and f"this recipe says {value}" in said
    )


@pytest.mark.parametrize("words", [(), ("--num-rollout", "3")])
def test_recorded_rollouts_that_are_not_there_stop_before_a_model_is_built(made, tmp_path, monkeypatch, words):
    monkeypatch.setattr(loop, "build_trainer", lambda *_: pytest.fail("a model was built"))
    args, options = arguments(made, "--load-rollouts", str(tmp_path), *words)
    with pytest.raises(
        InputError, match=f"--load-rollouts {tmp_path}: . of --num-rollout . steps are not there, step 0"
    ):
        loop.Run(args, options)


def test_responses_end_where_the_models_files_say(made, tmp_path):
    folder = copied(made, tmp_path)
    words = ("--tokenizer-model", str(folder / "tokenizer"))
    args, options = arguments(folder, *words)
    assert load_problems(args, options).stop_token_ids == (1,)
    (folder / "tokenizer/generation_config.json").write_text('{"eos_token_id": [5, 6, 10000]}')
    assert load_problems(args, options).stop_token_ids == (1, 5, 6)  # the model has no 10000
    args, options = arguments(folder, *words, "--rollout-stop-token-ids", "4")
    assert load_problems(args, options).stop_token_ids == (4,)
