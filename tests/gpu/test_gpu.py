"""The GPU script: whole where there is a GPU, and everywhere as far as a tiny model on the CPU goes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("check_gpu.py")


def run(*flags: str, **environment: str) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), **environment}
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], env=env, capture_output=True, text=True, timeout=500)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines, done.stderr[-2000:])
    return lines


def test_without_a_gpu_it_says_so():
    assert "no GPU" in run()[0]["skipped"]


def test_it_runs_on_a_tiny_model():
    lines = run("--tiny")
    assert {line["section"] for line in lines} == {"layers", "fp8", "step", "decode", "kernels"}
    assert all("failed" not in line for line in lines)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU here")
def test_on_the_gpu():
    lines = run(CUDA_VISIBLE_DEVICES="0")
    assert all("failed" not in line for line in lines), lines
