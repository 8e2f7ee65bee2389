"""Before any test imports torch or megatron: one thread, no GPU, and torch.cuda answered by the CPU.

Tests that need a GPU start their own processes: this one must stay fit to be forked (see ``distributed_helper``).
"""

import os
from pathlib import Path

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from megatron_dapo import platform  # noqa: E402

platform.install()

GROUPS = {"serving": "servers", "slurm": "servers", "parallel": "matrix"}
"""Folders whose tests share something costly, or too much memory to be there twice: ``make test`` runs two tests at a time,
those of a group one after the other."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if group := GROUPS.get(item.path.relative_to(Path(__file__).parent).parts[0]):
            item.add_marker(pytest.mark.xdist_group(group))
