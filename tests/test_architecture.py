"""The house rules, held by reading the code: floors, neighbours, sizes, docstrings, no machine's paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_dapo"

FLOORS = {
    "types": 0, "config": 1, "files": 1, "plugins": 1,
    "distributed": 2, "compat": 2, "algorithm": 2, "rewards": 2, "text_metrics": 2,
    "weights": 3, "data": 4, "rollout": 5, "training": 6, "servers": 6, "eval_record": 6, "evaluation": 7, "tracking": 8,
    "loop": 9, "commands": 10, "__main__": 11,
}  # fmt: skip
"""A module imports from its own floor's folder and from lower floors only."""

PURE = ("types", "config", "algorithm", "data", "rewards", "text_metrics", "rollout", "weights")
KNOWS_MEGATRON = ("rollout/embedded.py", "rollout/decoders.py", "weights/gather.py", "servers/publish.py")
BESIDE_SGLANG = "servers/cpu_platform.py"  # runs inside a server
ALLOWED_LONG = {
    "options.py": "the one flat list of options",
    "checks.py": "the one table of what does not fit together",
}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def violations(package: Path) -> list[str]:
    """Everything that breaks a rule in a package laid out like ours, a line each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name, tree = path.relative_to(package).as_posix(), ast.parse(path.read_text())
        part = part_of(path, package)
        if name == "__init__.py":
            continue
        if part not in FLOORS:
            found.append(f"{name}: on no floor")
            continue
        for imported in imports(tree):
            words = imported.split(".")
            other = words[1] if words[0] == "megatron_dapo" and len(words) > 1 else ""
            if other in FLOORS and other != part and FLOORS[other] >= FLOORS[part]:
                found.append(f"{name}: imports {imported} from its own or a higher floor")
            if words[0] == "sglang" and name != BESIDE_SGLANG:
                found.append(f"{name}: imports sglang, which is a neighbour")
            beneath = words[0] == "megatron" or imported.startswith("torch.distributed")
            if beneath and part in PURE and name not in KNOWS_MEGATRON:
                found.append(f"{name}: is pure and imports {imported}")
        found += [f"{name}: {line}" for line in sizes(path, tree)]
    return found


def sizes(path: Path, tree: ast.AST) -> Iterator[str]:
    lines = path.read_text().count("\n")
    if lines > 400 and path.name not in ALLOWED_LONG:
        yield f"{lines} lines, above 400"
    for node in ast.walk(tree):
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if named and not node.name.startswith("_") and not ast.get_docstring(node) and not _is_private(tree, node):
            yield f"{node.name} has no docstring"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > 60 and not (path.name in ALLOWED_LONG and node.name == "check_options"):
                yield f"{node.name} has {length} lines, above 60"
            if (depth := _depth(node)) > 4:
                yield f"{node.name} nests {depth} deep, above 4"


def _is_private(tree: ast.AST, inner: ast.AST) -> bool:
    """True inside a function or a private class."""
    outer = (
        n
        for n in ast.walk(tree)
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n is not inner
    )
    hides = (n for n in outer if not isinstance(n, ast.ClassDef) or n.name.startswith("_"))
    return any(inner is node for scope in hides for node in ast.walk(scope))


def _depth(node: ast.AST) -> int:
    """Deepest nest of blocks; an elif is no deeper than its if."""
    blocks = (ast.For, ast.While, ast.If, ast.With, ast.Try)
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + max((_depth(child) for child in node.body), default=0), _depth(node.orelse[0]))
    below = [_depth(child) for child in ast.iter_child_nodes(node)]
    return max(below, default=0) + isinstance(node, blocks)


def test_the_house_is_in_order():
    assert violations(PACKAGE) == []


def test_tools_are_in_order():
    found = [f"{p.name}: {line}" for p in (ROOT / "tools").rglob("*.py") for line in sizes(p, ast.parse(p.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    ("name", "code", "complaint"),
    [
        ("data/x.py", "from megatron_dapo.rollout import engine", "higher floor"),
        ("algorithm/x.py", "import torch.distributed as dist", "is pure"),
        ("rewards/x.py", "from megatron.core import mpu", "is pure"),
        ("rollout/x.py", "import sglang", "neighbour"),
        ("strange.py", "", "on no floor"),
        ("data/x.py", "\n" * 401, "above 400"),
        ("data/x.py", "def f():\n" + "    x = 1\n" * 60, "above 60"),
        ("data/x.py", "def f(): pass", "no docstring"),
        (
            "data/x.py",
            "def _f(a):\n if a:\n  if a:\n   if a:\n    if a:\n     if a:\n      pass",
            "nests 5 deep",
        ),
    ],
)
def test_every_rule_can_be_broken(tmp_path, name, code, complaint):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    found = violations(tmp_path)
    assert any(complaint in line for line in found), found


def test_no_file_names_a_machines_paths():
    private = re.compile(r"/(?:home|work|root)/[a-z]")
    folders = ("megatron_dapo", "tools", "tests", "examples", "benchmarks", "docs", "requirements", ".ci")
    files = [p for name in folders for p in (ROOT / name).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    for path in [*files, *(p for p in ROOT.iterdir() if p.is_file() and p.name != ".git")]:  # a worktree has a file
        if path.suffix in ("", ".py", ".md", ".toml", ".sh", ".txt"):
            assert not private.search(path.read_text()), path
