"""The doctor tells what is there, what an absence costs, and an apex that is not NVIDIA's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_task

from megatron_dapo.__main__ import main
from megatron_dapo.commands import doctor


def test_this_environment_can_run_the_quick_start(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("torch", "megatron-core", "Transformer Engine", "apex", "sglang", "NCCL", "GPUs"):
        assert name in out
    assert "The quick start can run." in out


def test_what_is_needed_and_missing_fails(monkeypatch, capsys):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "megatron-core" else version(package))
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "absent: nothing trains" in out and "cannot run without megatron-core" in out


def test_an_apex_that_is_not_nvidias_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    doctor.main()
    sys.modules.pop("apex", None)
    assert "not NVIDIA's: pip uninstall apex" in capsys.readouterr().out


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from megatron_dapo import compat
compat.install()
import numpy
import megatron_dapo.__main__, megatron_dapo.loop, megatron_dapo.commands.plan
from megatron_dapo.text_metrics import text_sums
from megatron_dapo.types import Sample
sums = text_sums([Sample(numpy.arange(9) % 4, numpy.zeros(9), "stop", 0, "")])
assert sums == {"text/distinct_2": (4.0, 8.0), "text/repetition_4": (1 - 4 / 6, 1.0)}, sums
from megatron_dapo.data.rows import read_rows
for name in {absent}:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " could be imported")
"""


def test_training_does_without_what_the_doctor_does_not_need(tmp_path):
    """Whatever is listed as not needed costs no more than it says: train imports, text metrics are there."""
    absent = {f.name.replace("-", "_") for f in doctor._packages() if not f.needed}
    assert {"nltk", "pyarrow", "wandb", "sglang", "matplotlib"} <= absent
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    script = WITHOUT.replace("{absent}", repr(absent))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_needs_an_absent_package_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "problems.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    recipe = write_task(tmp_path, prompt_data=[str(tmp_path / "problems.parquet")])
    assert main(["train", str(recipe)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("megatron_dapo: error: pyarrow is not installed (no .parquet files)")


def test_a_module_that_is_missing_otherwise_is_no_users_fault(monkeypatch):
    def run(command, rest):
        raise ModuleNotFoundError("No module named 'megatron_dapo.lost'", name="megatron_dapo.lost")

    monkeypatch.setattr("megatron_dapo.__main__._run", run)
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


def test_what_train_imports_at_once_is_needed():
    """Every package of another project that a module imports at its top is in the doctor's list as needed, or is torch."""
    import ast

    import megatron_dapo

    tops = {"torch"} | {f.name.replace("-", "_") for f in doctor._packages() if f.needed}
    tops.add("megatron")
    found = {}
    for path in Path(megatron_dapo.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found |= {name.partition(".")[0]: path.name for name in names}
    foreign = {name for name in found if name not in sys.stdlib_module_names and name != "megatron_dapo"}
    assert foreign <= tops, {name: found[name] for name in foreign - tops}
