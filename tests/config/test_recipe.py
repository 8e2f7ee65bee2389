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


DEEP = 20_000


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("lr = 1 # Länge".encode("latin-1"), ["not UTF-8", "byte 10"]),
        ("lr = 1".encode("utf-16"), ["not UTF-8"]),
        (b"lr = " + b"[" * DEEP + b"]" * DEEP, ["nested too deeply"]),
        (b"lr = " + b"{a=" * DEEP + b"1" + b"}" * DEEP, ["nested too deeply"]),
        (b"lr = " + b"9" * 5000, ["not valid TOML"]),
        (b"lr = 0x" + b"f" * 5000, ["'lr'", "64 bits"]),
        (b"lr = 9223372036854775808", ["'lr'", "64 bits"]),
        (b"lr = 2024-01-01", ["'lr'", "date"]),
        (b"lr = 10:00:00", ["'lr'", "date or time"]),
        (b"prompt_data = [[1]]", ["'prompt_data'", "list in a list"]),
        (b"prompt_data = [{a = 1}]", ["'prompt_data'", "table"]),
        (b"[[prompt_data]]\na = 1", ["'prompt_data'", "table"]),
        (b"prompt_data = ['a', true]", ["'prompt_data'", "switches"]),
        (b'prompt_data = "a\\u0000"', ["'prompt_data'", "NUL"]),
        (b"lr = 1\n'lr' = 2", ["not valid TOML"]),
        (b"num-layers = 1\nnum_layers = 1", ["'num_layers' stands twice"]),
        (b"[a]\nnum-layers = 1\n[b]\nnum_layers = 1", ["'num_layers' stands twice"]),
        (b"extends = 5", ["extends = 5", "name of a file"]),
        (b"extends = true", ["extends = True"]),
        (b"extends = ['r.toml', 3]", ["extends = ['r.toml', 3]"]),
        (b"extends = ''", ["extends = ''"]),
        (b'extends = "a\\u0000"', ["extends", "NUL"]),
        (b"[extends]\nlr = 1", ["extends = {'lr': 1}"]),
        (b"[a]\nextends = 'b.toml'", ["'extends' stands in a table"]),
        (b"extends = '.'", ["a folder"]),
        (b"#" * (2**20 + 1), ["1048577 bytes"]),
        (b"dynamic_sampling = true\nno_dynamic_sampling = false", ["'dynamic_sampling' and 'no_dynamic_sampling'"]),
        (b"help = true", ["unknown key 'help'"]),
        (b"'' = 1", ["unknown key ''"]),
        (b"lr = [1.0, 2.0]", ["'lr'", "not a list"]),
        (b"num_layers = 2.0", ["'num_layers' = 2.0", "int"]),
        (b"num_layers = 'two'", ["'num_layers' = 'two'", "int"]),
    ],
    ids=lambda value: str(value[:30]) if isinstance(value, bytes) else "",
)
def test_whatever_a_file_holds_is_refused_in_one_line(tmp_path, parser, content, names):
    path = tmp_path / "r.toml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        recipe_to_argv(read_recipe(path), parser, str(path))
    message = str(caught.value)
    assert (
        all(name in message for name in names)
        and "\n" not in message
        and str(tmp_path) in message
        and len(message) < 500
    )


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "r.toml"
    path.write_bytes("lr = 1e-6\r\n[data]\r\nprompt_data = ['Länge']\r\n".encode("utf-8-sig"))
    assert read_recipe(path) == {"lr": 1e-6, "prompt_data": ["Länge"]}


def test_a_deep_table_is_only_a_group(tmp_path):
    assert read_recipe(write(tmp_path, "r.toml", "[" + ".".join("a" * 300) + "]\nlr = 1\n")) == {"lr": 1}


def test_a_file_is_read_once_however_often_it_is_extended(tmp_path, monkeypatch):
    reads: list[str] = []
    original = type(tmp_path).read_bytes
    monkeypatch.setattr(type(tmp_path), "read_bytes", lambda self: reads.append(self.name) or original(self))
    for n in range(18):
        write(tmp_path, f"{n}.toml", f"extends = ['{n + 1}.toml', '{n + 1}.toml']\nlr = {n}\n")
    write(tmp_path, "18.toml", "num_layers = 3\n")
    assert read_recipe(tmp_path / "0.toml") == {"lr": 0, "num_layers": 3}
    assert sorted(reads) == sorted(f"{n}.toml" for n in range(19))


def test_a_later_file_wins_over_an_earlier_one_that_both_extend_the_same(tmp_path):
    write(tmp_path, "base.toml", "lr = 0.0\n")
    write(tmp_path, "a.toml", "extends = 'base.toml'\nlr = 1.0\n")
    path = write(tmp_path, "r.toml", "extends = ['a.toml', 'base.toml']\n")
    assert read_recipe(path) == {"lr": 0.0}


def test_a_long_chain_is_refused(tmp_path):
    for n in range(40):
        write(tmp_path, f"{n}.toml", f"extends = '{n + 1}.toml'\n")
    with pytest.raises(InputError, match="32 files extend each other"):
        read_recipe(tmp_path / "0.toml")


@pytest.mark.parametrize(
    "value", ["a\tb", "\x7f", "\r\n", "\x01", "ü😀", '"', "\\u", [1.5, -2.0], 1e-300, float("inf")]
)
def test_every_value_reads_back(tmp_path, value):
    write_recipe(tmp_path / "w.toml", {"x": value})
    assert read_recipe(tmp_path / "w.toml") == {"x": value}


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
