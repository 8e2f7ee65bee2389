"""Before any test imports torch or megatron: one thread, no GPU, torch.cuda answered by the CPU, and a temporary directory
of the session's own in which nobody may leave anything.

Tests that need a GPU start their own processes: this one must stay fit to be forked (see ``distributed_helper``).
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest

SESSION = "MEGATRON_DAPO_TEST_SESSION"
"""The variable that tells worker processes the session's temporary directory."""

PREFIX = "megatron_dapo_tests_"
"""The folder's name goes on with the id of its process."""

OWNER = SESSION not in os.environ

LET_GO_S = 20.0
"""Seconds that processes which are ending get to remove what they made."""

OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
"""A launcher's variables (and Slurm's) would make ranks of the processes that tests start."""


def remove_ended_sessions(parent: Path) -> None:
    """What a session left that was killed, or had failed tests: it is kept until the next."""
    for folder in parent.glob(f"{PREFIX}*_*"):
        pid = folder.name.removeprefix(PREFIX).split("_")[0]
        if pid.isdigit() and Path("/proc/self").exists() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def set_environment() -> None:
    """The same environment whatever the shell exports. Open to all, for a daemon of another user (munge) lives in the
    temporary directory."""
    for name in [name for name in os.environ if name in OUTER or name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if OWNER:
        remove_ended_sessions(Path(tempfile.gettempdir()))
        os.environ[SESSION] = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_")
        os.chmod(os.environ[SESSION], 0o755)
    os.environ["TMPDIR"] = tempfile.tempdir = os.environ[SESSION]
    os.environ["PET_LOG_DIR"] = os.environ[SESSION] + "/torchrun"  # torchrun keeps its logs


set_environment()

import torch  # noqa: E402

from megatron_dapo import compat  # noqa: E402

hypothesis.settings.register_profile(  # by default an example that takes 200 ms fails, and so do slow generators
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
torch.set_num_threads(1)  # a plugin may have imported torch before the variable was set
compat.install()

GROUPS = {"real_servers": "servers", "slurm": "servers", "parallel": "matrix"}
"""Folders whose tests share something costly, or too much memory to be there twice: ``make test`` runs two tests at a time,
those of a group one after the other."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class OneOfAGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return GROUPS.get(nodeid.split("/")[1], nodeid)

    return OneOfAGroup(config, log)


def left_behind(folder: Path) -> list[str]:
    """What a test, or a process that it started, has left in the temporary directory. pytest's own folders, torchrun's logs
    and torch's cache of compiled kernels are kept on purpose; wandb's two folders are there as long as a process that has
    imported it, this one for example."""
    kept, imported = ("pytest-of-", "torchrun", "torchinductor_"), ("wandb-media", "wandb-artifacts")
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if not name.startswith(kept) and not name.endswith(imported)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves something behind has failed."""
    if not OWNER:
        return
    folder, deadline = Path(os.environ[SESSION]), time.monotonic() + LET_GO_S
    while (left := left_behind(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        session.config.stash[LEFT] = left
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The temporary directory goes with the session; where a test failed, what it wrote stays to be looked at."""
    if not OWNER or not (folder := Path(os.environ.pop(SESSION, ""))).is_absolute():
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    failed = reporter is not None and (reporter.stats.get("failed") or reporter.stats.get("error"))
    if left := config.stash.get(LEFT, []):
        print(f"\nFAILED: left behind in the temporary directory: {', '.join(left)}")
    if failed:
        print(f"\nwhat the failed tests wrote is kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
