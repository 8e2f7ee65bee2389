"""Set-up without a network: what it refuses, and that it does nothing when nothing has changed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up reads, in a folder without an environment."""
    for name in ("tools/setup_env.sh", "pyproject.toml", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def set_up(folder: Path, kind: str = "quickstart", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", folder / "tools/setup_env.sh", kind],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_a_missing_python_gets_a_sentence(checkout):
    tools = checkout / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "sha256sum", "cut", "df", "awk"):
        (tools / tool).symlink_to(shutil.which(tool))
    found = set_up(checkout, PATH=str(tools), HOME=str(checkout), PYENV_ROOT=str(checkout), PYTHON="")
    if found.returncode == 0 or "making .venv" in found.stdout:
        pytest.skip("this machine has a Python 3.12 in a system folder")
    assert found.returncode == 2 and "no working Python 3.12" in found.stderr and "PYTHON=" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_an_unknown_kind_gets_a_sentence(checkout):
    found = set_up(checkout, "everything")
    assert found.returncode == 2 and "'everything'" in found.stderr


def test_an_unchanged_environment_is_left_alone():
    stamp = ROOT / ".venv/installed-test"
    if not stamp.is_file():
        pytest.skip("this environment was not made by tools/setup_env.sh test")
    before = stamp.stat().st_mtime_ns
    found = set_up(ROOT, "test")
    assert (found.returncode, found.stdout, stamp.stat().st_mtime_ns) == (0, "", before)


def test_every_requirement_is_pinned_once():
    pins: dict[str, str] = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            if line.startswith("#") or not line:
                continue
            found = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+-]+)", line)
            assert found, f"{file.name}: {line!r} is no exact pin"
            name = found[1].lower().replace("_", "-")
            assert name not in pins, f"{name} stands twice"
            pins[name] = found[2]
    assert {"torch", "megatron-core", "psutil", "sglang", "pytest"} <= pins.keys()
    assert "apex" not in pins and "vllm" not in pins


def test_megatron_and_sglang_load_in_one_process():
    """The test environment holds both: neither's pins may break the other's."""
    if not importlib.util.find_spec("sglang"):
        pytest.skip("only the test environment holds sglang")
    code = "import sglang.srt.server_args, megatron.training, megatron.core; print(megatron.core.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("0.19.2")
