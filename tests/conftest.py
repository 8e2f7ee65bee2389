"""Before any test imports torch or megatron: one thread, no GPU, and torch.cuda answered by the CPU.

Tests that need a GPU start their own processes: this one must stay fit to be forked (see ``distributed_helper``).
"""

import os
from typing import Any

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from megatron_dapo import platform  # noqa: E402

platform.install()

GROUPS = {"serving": "servers", "slurm": "servers", "parallel": "matrix"}
"""Folders whose tests share something costly, or too much memory to be there twice: ``make test`` runs two tests at a time,
those of a group one after the other."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class OneOfAGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return GROUPS.get(nodeid.split("/")[1], nodeid)

    return OneOfAGroup(config, log)
