"""Recipes: flattening, extending, the command line winning, and every way to get one wrong."""

import argparse

import pytest

from megatron_dapo.config.recipe import (
    read_recipe,
    recipe_to_argv,
    take_server_flags,
    take_server_keys,
    toml_value,
    write_recipe,
)
from megatron_dapo.types import InputError


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--prompt-data", nargs="+")
    parser.add_argument("--dynamic-sampling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--override-opt_param-scheduler", action="store_true")
    return parser


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_tables_are_only_for_the_reader(tmp_path):
    path = write(tmp_path, "r.toml", "num_layers = 2\n[a]\nlr = 1e-6\n[a.b]\nprompt-data = ['x', 'y']\n")
    assert read_recipe(path) == {"num_layers": 2, "lr": 1e-6, "prompt_data": ["x", "y"]}


def test_extending_files_are_overridden_in_order(tmp_path):
    write(tmp_path, "a.toml", "lr = 1.0\nnum_layers = 1\n")
    write(tmp_path, "b.toml", "lr = 2.0\nswiglu = true\n")
    path = write(tmp_path, "c.toml", "extends = ['a.toml', 'b.toml']\nswiglu = false\n")
    assert read_recipe(path) == {"lr": 2.0, "num_layers": 1, "swiglu": False}


def test_the_command_line_wins(tmp_path, parser):
    path = write(
        tmp_path,
        "r.toml",
        "num_layers = 2\nswiglu = true\ndynamic_sampling = false\nprompt_data = ['a', 'b']\n",
    )
    argv = recipe_to_argv(read_recipe(path), parser, str(path))
    args = parser.parse_args([*argv, "--num-layers", "3", "--dynamic-sampling"])
    assert (args.num_layers, args.swiglu, args.dynamic_sampling, args.prompt_data) == (
        3,
        True,
        True,
        ["a", "b"],
    )
    assert parser.parse_args(argv).dynamic_sampling is False


def test_switches_turned_off_leave_no_word(parser):
    assert recipe_to_argv({"swiglu": False}, parser, "r") == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("num_layer = 2\n", ["num_layer", "num_layers"]),
        ("swiglu = 3\n", ["swiglu", "true or false"]),
        ("num_layers = true\n", ["num_layers", "wants a value"]),
        ("num_layers = 2\n[x]\nnum_layers = 3\n", ["num_layers", "twice"]),
        ("num_layers = \n", ["not valid TOML"]),
        ("extends = 'r.toml'\n", ["extends itself"]),
        ("extends = 'absent.toml'\n", ["absent.toml", "no such file"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path, parser, text, names):
    path = write(tmp_path, "r.toml", text)
    with pytest.raises(InputError) as caught:
        recipe_to_argv(read_recipe(path), parser, str(path))
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


def test_a_written_recipe_reads_back(tmp_path):
    values = {"lr": 1e-6, "flag": True, "names": ["a", 'b"\\'], "none": None, "n": 3, "text": "x\ny"}
    write_recipe(tmp_path / "w.toml", values)
    assert read_recipe(tmp_path / "w.toml") == {k: v for k, v in values.items() if v is not None}
    assert toml_value(0.5) == "0.5"


def test_flags_for_the_servers_are_taken_out_of_recipe_and_command_line():
    rest, flags = take_server_keys(
        {"lr": 1e-6, "sglang_page_size": 16, "sglang_enable_metrics": True, "sglang_x": False}
    )
    assert rest == {"lr": 1e-6} and flags == {"page-size": "16", "enable-metrics": None}
    words = [
        "--lr",
        "1e-6",
        "--sglang-page-size",
        "16",
        "--sglang-enable-metrics",
        "--bf16",
        "--sglang-a=b=c",
        "--sglang-z",
    ]
    assert take_server_flags(words) == (
        ["--lr", "1e-6", "--bf16"],
        {"page-size": "16", "enable-metrics": None, "a": "b=c", "z": None},
    )
