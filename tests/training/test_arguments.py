"""From words to arguments and back: what a run writes as its recipe trains the same run, on any machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from tiny import write_task

from megatron_dapo import compat
from megatron_dapo.config.recipe import read_recipe, recipe_to_argv, recipe_value, write_recipe
from megatron_dapo.training.arguments import _given, parse
from megatron_dapo.types import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


def parser_of(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of a run: Megatron's flags and ours."""
    from megatron_dapo.training import arguments

    made: list[argparse.ArgumentParser] = []
    original = arguments._Argv.__call__
    monkeypatch.setattr(arguments._Argv, "__call__", lambda self, p: made.append(original(self, p)) or made[0])
    parse(argv)
    return made[0]


def same_run(first: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``first`` and the recipe written by it come to the same arguments, all of them."""
    args, options = parse(first)
    write_recipe(folder / "recipe.toml", args.resolved)
    again, options_again = parse([str(folder / "recipe.toml"), "--dry-run"])
    assert options_again == options
    ignored = {"recipe", "timers"}
    left, right = ({k: v for k, v in vars(a).items() if k not in ignored} for a in (args, again))
    assert left == right
    assert again.resolved == args.resolved


@pytest.mark.parametrize("recipe", sorted(p.name for p in EXAMPLES.glob("*.toml")))
def test_the_recipe_of_every_example_trains_the_same_run(recipe, tmp_path, monkeypatch):
    same_run([str(EXAMPLES / recipe), "--dry-run"], tmp_path, monkeypatch)


FLAGS = [
    ["--rollout-stop-token-ids", "1", "2", "--icepop-range", "0.5", "3", "--alarm-entropy", "0", "2"],
    ["--attention-backend", "flash", "--exit-signal", "SIGUSR1"],
    ["--moe-layer-freq", "[0]+[1]", "--num-experts", "4", "--moe-router-topk", "2"],
    ["--no-rope-fusion", "--no-bias-swiglu-fusion", "--no-dedup-prompts", "--no-weight-probe", "--apply-chat-template"],
    ["--no-use-distributed-optimizer"],
    ["--transformer-impl", "transformer_engine"],  # Megatron's default, which no CPU has
    ["--weight-decay", "0.01", "--clip-grad", "2", "--adam-beta2", "0.98"],  # Megatron's defaults beside ours
    ["--prompt-template=" + '- "{problem}"\\\n\t\x7f ünï', "--label-regex=-(.*)", "--sglang-a=", "--sglang-b", "x"],
    ["--lr-decay-style", "cosine", "--min-lr", "1e-8", "--lr-decay-iters", "77", "--bf16", "--sglang-switch"],
    ["--override-opt_param-scheduler", "--persistent-save-interval", "7", "--cuda-graph-modules", "attn", "mlp"],
    ["--rollout-top-k=-1", "--window-size", "3,4"],
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: flags[0])
def test_flags_of_every_kind_come_back_from_the_recipe(flags, tmp_path, monkeypatch):
    same_run([str(write_task(tmp_path / "task")), "--dry-run", *flags], tmp_path, monkeypatch)


def another_value(action: argparse.Action) -> list[str]:
    """Words that give ``action`` a value of its kind, not its default."""
    if action.nargs == 0:
        return []
    if action.choices is not None:
        first = next(c for c in action.choices if c != action.default and [c] != action.default)
        word = getattr(first, "name", str(first))
    else:
        kind = {int: "7", float: "0.375", bool: "yes", str: 'a "b" \\ ü', None: "=x"}
        word = kind.get(action.type, {"--window-size": "(3,4)", "--cuda-graph-scope": "attn", "--cuda-graph-modules": "mlp",
                                     "--rotary-base": "10000.5"}
                        .get(action.option_strings[0], "[0,1,1]"))  # fmt: skip
    return [word] * action.nargs if isinstance(action.nargs, int) else [word]


def test_a_value_of_every_flag_there_is_comes_back_from_a_recipe(tmp_path, monkeypatch):
    parser = parser_of([str(write_task(tmp_path / "task")), "--dry-run"], monkeypatch)
    wrong: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        for flag in action.option_strings:
            words = another_value(action)
            value = _given(parser, [f"{flag}={words[0]}"] if action.nargs is None else [flag, *words])[action.dest]
            key, written = recipe_value(action, value)
            write_recipe(tmp_path / "r.toml", {key: written})
            again = _given(parser, recipe_to_argv(read_recipe(tmp_path / "r.toml"), parser, "r"))
            if again != {action.dest: value}:
                wrong.append(f"{flag}: {value!r} became {again}")
    assert not wrong, wrong


def test_a_recipe_holds_nothing_of_the_machine(tmp_path):
    args, _ = parse([str(write_task(tmp_path)), "--dry-run"])
    lacks = {flag.lstrip("-").replace("-", "_") for flag in compat.default_flags() if flag.startswith("--")}
    assert lacks and not lacks & args.resolved.keys()
    assert args.transformer_impl == "local" and "help" not in args.resolved
    asked, _ = parse([str(write_task(tmp_path, transformer_impl="local")), "--dry-run", "--no-rope-fusion"])
    assert asked.resolved["transformer_impl"] == "local" and asked.resolved["no_rope_fusion"] is True


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--train-iters", "7"], ["--train-iters 7", "--num-rollout"]),
        (["--seq-length", "7"], ["--seq-length 7", "--rollout-max-response-len"]),
        (["--micro-batch-size", "2"], ["--micro-batch-size 2", "--max-tokens-per-gpu"]),
        (["--lr-warmup-iters", "2"], ["--lr-warmup-iters 2", "--lr-warmup-rollouts"]),
        (["--yaml-cfg", "x.yaml"], ["--yaml-cfg", "TOML"]),
        (["--attention-backend", "fast"], ["--attention-backend", "'fast'", "unfused"]),
        (["--moe-layer-freq", "[0"], ["--moe-layer-freq", "'[0'"]),
        (["--min-lr", "1e-4x"], ["--min-lr", "1e-4x"]),
        (["--run-dir", "a\udcff"], ["UTF-8"]),
        (["--run-dir", "a\0"], ["UTF-8"]),
    ],
    ids=lambda value: value[0],
)
def test_words_that_cannot_be_followed_are_refused(tmp_path, flags, names):
    with pytest.raises(InputError) as caught:
        parse([str(write_task(tmp_path)), "--dry-run", *flags])
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"num_layers": 2.5}, ["recipe.toml: 'num_layers' = 2.5", "int"]),
        ({"lr": "fast"}, ["recipe.toml: 'lr' = 'fast'", "float"]),
        ({"loss_agg_mode": "token-sum"}, ["recipe.toml: 'loss_agg_mode'", "token-mean"]),
        ({"attention_backend": "fast"}, ["'attention_backend'", "unfused"]),
        ({"lr": [1e-6, 1e-7]}, ["'lr'", "not a list"]),
        ({"prompt_data": []}, ["'prompt_data'", "at least one"]),
        ({"dynamic_sampling": True, "no_dynamic_sampling": True}, ["'dynamic_sampling' and 'no_dynamic_sampling'"]),
        ({"help": True}, ["unknown key 'help'"]),
        ({"prompt_data": ["-x.jsonl"]}, ["'prompt_data'", "./-x.jsonl"]),
        ({"sglang_x": [1, 2]}, ["'sglang_x'", "not a list"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_recipes_value_of_another_kind_is_refused_with_the_recipes_name(tmp_path, overrides: dict[str, Any], names):
    with pytest.raises(InputError) as caught:
        parse([str(write_task(tmp_path, **overrides)), "--dry-run"])
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)
