"""What the documentation and the messages tell the user to type exists: commands, flags, files, metrics."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron_dapo.config import OPTION_PARTS
from megatron_dapo.tracking import METRICS, row_of
from megatron_dapo.training import arguments

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/**/*.md")])
SOURCES = sorted([*(ROOT / "megatron_dapo").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *ROOT.glob("examples/*.py")])
RECIPES = sorted(ROOT.glob("examples/**/*.toml"))
SCRIPTS = sorted([*ROOT.glob("slurm/*.sh"), *ROOT.glob("examples/*.sh"), *ROOT.glob("tools/*.sh")])

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
FOREIGN = {
    "--standalone": "torchrun", "--nproc-per-node": "torchrun",
    "--nodes": "Slurm", "--export": "Slurm", "--job-name": "Slurm", "--gpus-per-node": "Slurm", "--exclusive": "Slurm",
    "--mem": "Slurm", "--time": "Slurm", "--output": "Slurm", "--open-mode": "Slurm", "--signal": "Slurm",
    "--container-image": "Slurm", "--container-mounts": "Slurm", "--nodelist": "Slurm", "--ntasks": "Slurm",
    "--ntasks-per-node": "Slurm", "--cpus-per-task": "Slurm", "--kill-on-bad-exit": "Slurm", "--overlap": "Slurm",
    "--gpu-bind": "Slurm", "--oneliner": "Slurm",
    "--no-deps": "pip", "--no-build-isolation": "pip", "--quiet": "pip", "--disable-pip-version-check": "pip",
    "--editable": "pip",
}  # fmt: skip
"""Flags of other programs that stand in documentation, messages or scripts."""
SGLANGS = {"--incremental-streaming-output", "--stream-interval", "--enable-deterministic-inference"}
"""SGLang's flags by their own names; they reach it as ``--sglang-NAME`` or in ``server_command``."""
NO_FLAGS = {"--flag", "--x", "--no-x", "--sampler"}
"""Stand for any flag, or are an arrow of a picture."""
PLACEHOLDERS = ("runs/", "data/", "models/", "http://", "$", "x/")


@cache
def parser_of_train() -> argparse.ArgumentParser:
    ours = arguments._Argv([])
    with arguments._argv_of_this_call():
        arguments.megatron_arguments.parse_args(extra_args_provider=ours)
    assert ours.parser is not None
    return ours.parser


@cache
def flags_of_tool(path: Path) -> frozenset[str]:
    """Flags that a script declares, or compares its words with."""
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str) and FLAG.fullmatch(text))


def exists(flag: str, tools: bool = True) -> bool:
    """True where a command of ours takes it, or it is known to be another's."""
    if (
        flag in FOREIGN
        or flag in SGLANGS
        or flag in NO_FLAGS
        or flag.startswith("--sglang-")
        or flag in ("--help", "--version")
    ):
        return True
    if flag in parser_of_train()._option_string_actions:
        return True
    scripts = [
        *ROOT.glob("tools/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        ROOT / "tests/gpu/check_gpu.py",
    ]
    return tools and any(flag in flags_of_tool(path) for path in scripts)


def commands_of(text: str) -> Iterator[str]:
    """The lines of the code blocks, without comments; a line that ends in a backslash goes on."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if command := line.partition(" #")[0].partition("   ")[0].strip():
                yield command


COMMANDS = [
    (path.relative_to(ROOT).as_posix(), command)
    for path in DOCS
    for command in commands_of(path.read_text())
    if re.match(r"(\w+=\S+ )*(python|torchrun|sbatch|bash|make)\b", command)
]


def is_placeholder(word: str) -> bool:
    return word.startswith(PLACEHOLDERS) or word.isupper() or word.split(".")[0].isupper()


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 15 and {command.split()[0] for _, command in COMMANDS} >= {
        "python",
        "torchrun",
        "sbatch",
        "make",
    }


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=lambda text: text)
def test_a_command_of_the_documentation_parses(where, command):
    """Its flags exist and their values are of their kind, the files that it names are there."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    for word in words:
        looks_like_a_file = re.fullmatch(r"[\w./-]+\.(py|sh|toml|md)", word) and not is_placeholder(word)
        assert not looks_like_a_file or (ROOT / word).is_file(), f"{word} is not there"
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets)
    elif "megatron_dapo" in words:
        parses(words[words.index("megatron_dapo") + 1 :])
    elif words[0] == "sbatch":
        parses(["train", *words[2:]])
    elif words[0] == "python":
        given = {flag for flag in words[2:] if flag.startswith("--")}
        known = flags_of_tool(ROOT / words[1]) | (
            parser_of_train()._option_string_actions.keys() if "convert" in words[1] else set()
        )
        assert given <= known, given - known


def parses(words: list[str]) -> None:
    from megatron_dapo.__main__ import USAGE

    command, *rest = words
    assert re.search(rf"^  {command} ", USAGE, re.M), f"no command {command}"
    if command == "serve":
        arguments.parse_for_servers(rest)
    elif command != "doctor":
        flags = shlex.split(re.sub(r"--hf-checkpoint \S+", "", shlex.join(rest[not rest[0].startswith("-") :])))
        ours = arguments._Argv(flags)
        with arguments._argv_of_this_call():
            arguments.megatron_arguments.parse_args(extra_args_provider=ours)


@pytest.mark.parametrize("path", [*DOCS, *RECIPES, *SCRIPTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_flag_written_down_exists(path):
    assert sorted({flag for flag in FLAG.findall(path.read_text()) if not exists(flag)}) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_flag_that_help_or_a_message_names_exists(path):
    """All strings of the code: help, errors, notes, documentation."""
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    flags = {flag for text in texts if isinstance(text, str) for flag in FLAG.findall(text)}
    assert sorted(flag for flag in flags if not exists(flag)) == []


def test_sglangs_flags_are_sglangs():
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed: make test installs it")
    fields = "\n".join(
        p.read_text() for p in Path(spec.submodule_search_locations[0], "srt/arg_groups/fields").glob("*.py")
    )
    written = {
        flag.replace("--sglang-", "--")
        for path in [*DOCS, *SOURCES]
        for flag in FLAG.findall(path.read_text())
        if flag.startswith("--sglang-")
    }
    flags = written | SGLANGS
    absent = [flag for flag in flags if not re.search(rf"^    {flag[2:].replace('-', '_')}:", fields, re.M)]
    assert absent == [] and flags


@pytest.mark.parametrize("path", [*DOCS, *RECIPES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_linked_or_named_are_there(path):
    text = path.read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in linked if not (path.parent / link).exists()] == []
    folders = "megatron_dapo|tools|docs|examples|slurm|tests|benchmarks|requirements|rollout|weights|algorithm|tracking"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    roots = (ROOT, ROOT / "megatron_dapo", path.parent)
    stems = ("", ".py")
    absent = [name for name in named if not any((root / (name + stem)).exists() for root in roots for stem in stems)]
    assert [name for name in absent if row_of(name) is None] == []


METRIC = re.compile(r"`([a-z][\w-]*/[\w<>@./*-]+)`")
FIRST = {name.partition("/")[0] for name in METRICS}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_metric_that_the_documentation_names_is_in_the_table(path):
    names = [word for quoted in re.findall(r"`([^`\n]+)`", path.read_text()) for word in quoted.split()]
    for name in names:
        first, _, rest = name.partition("/")
        if first not in FIRST or not rest or "." in rest:
            continue
        if rest == "*":
            assert any(row.startswith(first + "/") for row in METRICS), name
        else:
            concrete = (
                name.replace("<source>", "aime").replace("<k>", "8").replace("<part>", "gen").replace("<name>", "x")
            )
            assert row_of(concrete) is not None, name


def test_every_option_is_read_somewhere():
    """An option that nothing reads promises in --help what nothing does."""
    read: set[str] = set()
    for path in (ROOT / "megatron_dapo").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    options = [field.name for part in OPTION_PARTS for field in dataclasses.fields(part)]
    assert len(options) > 90 and [name for name in options if name not in read] == []
