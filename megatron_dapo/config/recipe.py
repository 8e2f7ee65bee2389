"""Recipes: a TOML file of flag names. Tables only group keys for the reader; the command line wins over the file.

Example:
    extends = ["models/qwen2.5_32b.toml"]   # optional: start from these files beside this one; later ones win

    [loss]
    eps_clip_c = 10.0               # the flag --eps-clip-c

    [parallel]
    sequence_parallel = true        # a flag without a value
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_dapo.types import InputError


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The keys of a recipe and of those it extends, flattened, with underscores.

    Raises:
        InputError: the file is missing or no TOML, a key stands twice, or recipes extend each other in a circle.
    """
    return _read(Path(path), seen=())


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise InputError(f"recipe {path}: it extends itself through {seen[-1].name}; remove one 'extends'")
    if not path.is_file():
        raise InputError(f"recipe {path}: no such file; give the path of a .toml recipe (examples/ has some)")
    try:
        tree = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {path}: not valid TOML: {error}") from None
    base: dict[str, Any] = {}
    extends = tree.pop("extends", [])
    for other in [extends] if isinstance(extends, str) else extends:
        base |= _read(path.parent / str(other), (*seen, path.resolve()))
    own: dict[str, Any] = {}
    for key, value in _leaves(tree):
        if key in own:
            raise InputError(f"recipe {path}: '{key}' stands twice; keep one")
        own[key] = value
    return base | own


def _leaves(tree: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield key.replace("-", "_"), value


def recipe_to_argv(recipe: dict[str, Any], parser: argparse.ArgumentParser, source: str) -> list[str]:
    """Turn recipe keys into command-line words for ``parser``.

    Raises:
        InputError: a key is no flag of the parser (the nearest known one is named), or a switch has a value.
    """
    known = parser._option_string_actions
    argv: list[str] = []
    for key, value in recipe.items():
        flag = "--" + key.replace("_", "-")
        if flag not in known and "--" + key in known:  # a few of Megatron's flags are spelled with underscores
            flag = "--" + key
        if flag not in known:
            raise InputError(f"{source}: unknown key '{key}'{nearest(key, (k[2:].replace('-', '_') for k in known))}")
        switch = known[flag].nargs == 0
        if switch and not isinstance(value, bool):
            raise InputError(f"{source}: '{key}' is a switch: write {key} = true or false, not {value!r}")
        if not switch and isinstance(value, bool):
            raise InputError(f"{source}: '{key}' wants a value, not {str(value).lower()}")
        if not switch:
            argv += [flag, *map(str, value if isinstance(value, list) else [value])]
        elif value:
            argv.append(flag)
        elif "--no-" + flag[2:] in known:
            argv.append("--no-" + flag[2:])
    return argv


def take_server_keys(recipe: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str | None]]:
    """A recipe without its ``sglang_*`` keys, and these as SGLang's flags: name -> value, None for a switch; false: absent."""
    rest = {key: value for key, value in recipe.items() if not key.startswith("sglang_")}
    flags = {
        key.removeprefix("sglang_").replace("_", "-"): None if value is True else str(value)
        for key, value in recipe.items()
        if key.startswith("sglang_") and value is not False
    }
    return rest, flags


def take_server_flags(words: list[str]) -> tuple[list[str], dict[str, str | None]]:
    """A command line without its ``--sglang-*`` words, and these as SGLang's flags: name -> value, None for a switch.

    Example:
        take_server_flags(["--lr", "1e-6", "--sglang-page-size", "16", "--sglang-enable-metrics"])
        # ["--lr", "1e-6"], {"page-size": "16", "enable-metrics": None}
    """
    rest: list[str] = []
    flags: dict[str, str | None] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--sglang-"):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--sglang-").partition("=")
        takes_next = not equals and words and not words[0].startswith("--")
        flags[name] = words.pop(0) if takes_next else value if equals else None
    return rest, flags


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for an unknown name, or nothing where no known one is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def write_recipe(path: Path, values: dict[str, Any]) -> None:
    """Write resolved values as a recipe that can be run again; values that TOML lacks (None) are left out."""
    path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in values.items() if value is not None))


def toml_value(value: Any) -> str:
    """One value in TOML's spelling."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
