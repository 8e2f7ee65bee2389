"""The table of mutants, read and checked: one line of the package changed, and the tests that must notice."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.toml")


@dataclass(frozen=True)
class Mutant:
    """``line`` of ``file`` (below the package; without its indentation, or several lines) becomes ``becomes``. ``tests`` are
    the node ids that must fail; none where the change is ``equivalent``, which says why."""

    file: str
    line: str
    becomes: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def name(self) -> str:
        """What a report calls it."""
        return f"{self.file}: {self.line.strip()!r} -> {self.becomes.strip()!r}"

    def apply(self, source: str) -> str:
        """The source of ``file``, mutated.

        Raises:
            ValueError: the line is not there exactly once.
        """
        found = re.findall(rf"(?m)^[ \t]*{re.escape(self.line)}$", source)
        if len(found) != 1:
            raise ValueError(f"{self.name}: the line is there {len(found)} times, not once; change the table")
        indent = found[0][: len(found[0]) - len(found[0].lstrip())]
        return source.replace("\n" + found[0] + "\n", "\n" + indent + self.becomes + "\n", 1)


def read_table(path: Path = TABLE) -> list[Mutant]:
    """All rows. A file's table names the ``tests`` of its rows where a row does not."""
    mutants = []
    for file, section in tomllib.loads(path.read_text()).items():
        for row in section["mutants"]:
            tests = _nodes(row.get("tests", section.get("tests", [])))
            equivalent = row.get("equivalent", "")
            mutants.append(Mutant(file, row["line"], row["becomes"], () if equivalent else tests, equivalent))
    return mutants


def _nodes(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
