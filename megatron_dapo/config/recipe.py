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
import enum
import json
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.types import InputError

MAX_BYTES = 2**20
"""A recipe is written by hand; whatever is larger is another file."""

MAX_EXTENDS = 32
"""Files that may extend each other in a chain."""


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The keys of a recipe and of those it extends, flattened, with underscores.

    Raises:
        InputError: the file is missing or no TOML, a key stands twice, or recipes extend each other in a circle.
    """
    return _read(Path(path), (), {})


def _read(path: Path, seen: tuple[Path, ...], known: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """``seen``: the files that led here; ``known``: those read already, each once however often it is named."""
    place = path.resolve()
    if place in seen:
        raise InputError(f"recipe {path}: it extends itself through {seen[-1].name}; remove one 'extends'")
    if len(seen) >= MAX_EXTENDS:
        raise InputError(f"recipe {path}: {MAX_EXTENDS} files extend each other in a chain; join some of them")
    if place not in known:
        tree = _toml(path)
        base: dict[str, Any] = {}
        for other in _extended(path, tree.pop("extends", [])):
            base |= _read(path.parent / other, (*seen, place), known)
        known[place] = base | _own(path, tree)
    return known[place]


def _toml(path: Path) -> dict[str, Any]:
    """The tree of a file in UTF-8, with a byte order mark or without."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise InputError(f"recipe {path}: {what}; give the path of a .toml recipe (examples/ has some)")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"recipe {path}: {path.stat().st_size} bytes are no recipe; give a .toml of flag names")
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"recipe {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except RecursionError:
        raise InputError(f"recipe {path}: nested too deeply; tables only group keys, one level is enough") from None
    except ValueError as error:  # no TOML, or an integer of thousands of digits
        raise InputError(f"recipe {path}: not valid TOML: {' '.join(str(error).split())}") from None


def _extended(path: Path, given: Any) -> list[str]:
    """The files named by ``extends``."""
    files = [given] if isinstance(given, str) else given
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        raise InputError(f"recipe {path}: extends = {shown(given)}: give the name of a file, or a list of names")
    if any("\0" in file for file in files):
        raise InputError(f"recipe {path}: extends = {shown(given)}: a NUL character is in a name; remove it")
    return files


def _own(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """The keys of one file, without its tables."""
    own: dict[str, Any] = {}
    for key, value in _leaves(tree):
        if key == "extends":
            raise InputError(f"recipe {path}: 'extends' stands in a table; write it above the first [table]")
        if key in own:
            raise InputError(f"recipe {path}: '{key}' stands twice; keep one")
        _check_value(f"recipe {path}: '{key}'", value)
        own[key] = value
    return own


def _leaves(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    waiting = [iter(tree.items())]
    while waiting:
        for key, value in waiting[-1]:
            if isinstance(value, dict):
                waiting.append(iter(value.items()))
                break
            yield key.replace("-", "_"), value
        else:
            waiting.pop()


def _check_value(where: str, value: Any) -> None:
    """Refuse what is no flag's value: dates, tables in lists, lists in lists, and text that no file name can hold."""
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, (bool, int, float, str)):
            kind = "table" if isinstance(item, dict) else "list in a list" if isinstance(item, list) else "date or time"
            raise InputError(
                f"{where} = {shown(value)}: a {kind} is no flag's value; give text, a number or a list of them"
            )
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise InputError(f"{where}: a number of more than 64 bits; give a smaller one")
        if isinstance(item, str) and "\0" in item:
            raise InputError(f"{where} = {shown(value)}: a NUL character is in it; remove it")
        if isinstance(item, bool) and isinstance(value, list):
            raise InputError(f"{where} = {shown(value)}: true and false are switches, not items of a list")


def shown(value: Any) -> str:
    """A value in a message of one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + " ..."


def recipe_to_argv(recipe: dict[str, Any], parser: argparse.ArgumentParser, source: str) -> list[str]:
    """Turn recipe keys into command-line words for ``parser``.

    Raises:
        InputError: a key is no flag of the parser (the nearest known one is named), a value is not what its flag takes, or
            two keys set the same thing.
    """
    known = parser._option_string_actions
    argv: list[str] = []
    setters: dict[str, str] = {}
    for key, value in recipe.items():
        flag = "--" + key.replace("_", "-")
        if flag not in known or isinstance(known[flag], argparse._HelpAction):
            raise InputError(f"{source}: unknown key '{key}'{nearest(key, (k[2:].replace('-', '_') for k in known))}")
        action = known[flag]
        if (other := setters.setdefault(action.dest, key)) != key:
            raise InputError(
                f"{source}: '{other}' and '{key}' set the same; keep one (of a switch: {action.dest} = false)"
            )
        switch = action.nargs == 0
        if switch and not isinstance(value, bool):
            raise InputError(f"{source}: '{key}' is a switch: write {key} = true or false, not {shown(value)}")
        if not switch and isinstance(value, bool):
            raise InputError(f"{source}: '{key}' wants a value, not {str(value).lower()}")
        if not switch:
            argv += _words(parser, action, flag, value, source)
        elif value:
            argv.append(flag)
        elif "--no-" + flag[2:] in known:
            argv.append("--no-" + flag[2:])
    return argv


def _words(parser: argparse.ArgumentParser, action: argparse.Action, flag: str, value: Any, source: str) -> list[str]:
    """A flag and its value, of the kind that the flag takes."""
    key, single = flag[2:].replace("-", "_"), action.nargs is None
    items = value if isinstance(value, list) else [value]
    if single and isinstance(value, list):
        raise InputError(f"{source}: '{key}' = {shown(value)}: one value, not a list")
    if (action.nargs == "+" and not items) or (isinstance(action.nargs, int) and len(items) != action.nargs):
        wanted = "at least one value" if action.nargs == "+" else f"{action.nargs} values"
        raise InputError(f"{source}: '{key}' = {shown(value)}: {wanted}")
    words = [str(item) for item in items]
    try:
        for word in words:
            parser._check_value(action, parser._get_value(action, word))
    except argparse.ArgumentError as error:
        raise InputError(f"{source}: '{key}' = {shown(value)}: {error.message}") from None
    if single:
        return [f"{flag}={words[0]}"]
    if dashed := [word for word in words if word.startswith("-") and not parser._negative_number_matcher.match(word)]:
        raise InputError(
            f"{source}: '{key}': {shown(dashed[0])} begins with '-' and reads as a flag; write ./{dashed[0]}"
        )
    return [flag, *words]


def recipe_value(action: argparse.Action, value: Any) -> tuple[str, Any]:
    """A parsed value of ``action`` as a key and a value of a recipe: what ``recipe_to_argv`` turns into the same again.

    Example:
        recipe_value(attention_backend, AttnBackend.unfused)      # "attention_backend", "unfused"
    """
    key = action.option_strings[0].lstrip("-").replace("-", "_")
    if isinstance(action, argparse.BooleanOptionalAction):
        return key, value
    if action.nargs == 0:
        return key, True
    if isinstance(value, list) and action.nargs is not None:
        return key, [_plain(action, item) for item in value]
    return key, _plain(action, value)


def _plain(action: argparse.Action, value: Any) -> Any:
    """One value as TOML has it; what a flag makes of text by a rule of its own is written as that text."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or action.type in (None, int, float, str) or type(value) in (int, float):
        return value
    if action.type is bool:  # whatever is not empty
        return "true" if value else ""
    if isinstance(value, int | float):
        return value
    return str(value).replace(" ", "")


def take_server_keys(recipe: dict[str, Any], source: str = "recipe") -> tuple[dict[str, Any], dict[str, str | None]]:
    """A recipe without its ``sglang_*`` keys, and these as SGLang's flags: name -> value, None for a switch; false: absent.

    Raises:
        InputError: a value is a list.
    """
    rest = {key: value for key, value in recipe.items() if not key.startswith("sglang_")}
    taken = {key: value for key, value in recipe.items() if key.startswith("sglang_") and value is not False}
    for key, value in taken.items():
        if isinstance(value, list):
            raise InputError(f"{source}: '{key}' = {shown(value)}: one value, not a list")
    flags = {k.removeprefix("sglang_").replace("_", "-"): None if v is True else str(v) for k, v in taken.items()}
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
    close = difflib.get_close_matches(name[:80], list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def write_recipe(path: Path, values: dict[str, Any]) -> None:
    """Write resolved values as a recipe that can be run again; values that TOML lacks (None) are left out."""
    lines = [f"{key} = {toml_value(value)}\n" for key, value in values.items() if value is not None]
    path.write_text("".join(lines), encoding="utf-8")


def toml_value(value: Any) -> str:
    """One value in TOML's spelling."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and not isinstance(value, enum.Enum):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise TypeError(f"{value!r} has no spelling in TOML")
