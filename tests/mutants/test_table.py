"""The table of mutants fits the package: run.py would refuse it otherwise, but nobody runs that on every commit."""

from __future__ import annotations

import ast

import pytest
from table import ROOT, Mutant, read_table


def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_line_is_there_once_and_every_test_exists():
    table, wrong = read_table(), []
    tests = {node.split("::")[0]: functions(node.split("::")[0]) for mutant in table for node in mutant.tests}
    for mutant in table:
        source = (ROOT / "megatron_dapo" / mutant.file).read_text()
        try:
            ast.parse(mutant.apply(source))
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
        named = [node.split("[")[0].split("::") for node in mutant.tests]
        wrong += [f"{mutant.name}: no test {rest[-1]}" for file, *rest in named if rest and rest[-1] not in tests[file]]
        if bool(mutant.tests) == bool(mutant.equivalent) or mutant.line == mutant.becomes:
            wrong.append(f"{mutant.name}: names either its tests or why it is equivalent, and changes something")
    assert wrong == []
    assert len({(m.file, m.line, m.becomes) for m in table}) == len(table) >= MINIMUM


MINIMUM = 100


def test_a_line_that_is_not_there_once_is_refused():
    source = "def f():\n    a = 1\n    b = 2\n    a = 1\n"
    assert Mutant("x.py", "b = 2", "b = 3").apply(source) == source.replace("b = 2", "b = 3")
    assert Mutant("x.py", "b = 2\n    a = 1", "pass").apply(source) == "def f():\n    a = 1\n    pass\n"
    for line in ("a = 1", "b = ", "c = 3"):
        with pytest.raises(ValueError, match="x.py: .* times, not once"):
            Mutant("x.py", line, "pass").apply(source)
