"""The helper that every distributed test stands on: results, errors, deaths and hangs."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helper import RankError, run_ranks

TESTS = Path(__file__).parents[1]

NEVER_S = 100_000.0
"""Who waits as long as this has not noticed what the test is about; the test's own timeout ends it."""


def _children() -> set[str]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as listing:
        return set(listing.read().split())


def test_results_come_back_in_rank_order() -> None:
    scale = 10

    def total(start: int) -> tuple[int, float, str]:
        x = torch.tensor(float(start + scale * dist.get_rank()))
        dist.all_reduce(x)
        return dist.get_rank(), x.item(), os.environ["RANK"]

    assert run_ranks(total, 3, 1) == [(0, 33.0, "0"), (1, 33.0, "1"), (2, 33.0, "2")]


def test_an_exception_of_one_rank_is_raised_here_while_others_wait_for_it() -> None:
    def fails_on_one() -> None:
        if dist.get_rank() == 1:
            raise ValueError("too many cooks")
        dist.barrier()

    before = _children()
    with pytest.raises(RankError, match="rank 1:(.|\n)*too many cooks"):
        run_ranks(fails_on_one, 2, deadline_s=NEVER_S)
    assert _children() == before


def test_a_rank_that_dies_is_noticed_while_another_is_busy() -> None:
    def dies() -> None:
        if dist.get_rank() == 0:
            os._exit(7)
        time.sleep(NEVER_S)

    with pytest.raises(RankError, match="rank 0: died"):
        run_ranks(dies, 2, deadline_s=NEVER_S)


def test_a_hang_ends_at_the_deadline() -> None:
    before = _children()
    with pytest.raises(RankError, match="rank 1: had not ended by the deadline"):
        run_ranks(lambda: time.sleep(NEVER_S * dist.get_rank()), 2, deadline_s=2.0)
    assert _children() == before


def test_nothing_stays_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a rank that dies: a fork does not clean up what it made."""

    def makes_folders() -> str:
        folder = tempfile.mkdtemp()
        inherited = subprocess.run(["mktemp", "-d"], capture_output=True, text=True).stdout
        assert Path(folder).parent == Path(inherited).parent and Path(folder).parent.parent == tmp_path
        if dist.get_rank() == 1:
            os._exit(7)
        return folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RankError, match="rank 1: died"):
        run_ranks(makes_folders, 2)
    assert list(tmp_path.iterdir()) == [] and tempfile.gettempdir() == str(tmp_path)


POOL = """
import torch
from distributed_helper import run_ranks
assert torch.get_num_threads() == 2
wide = torch.ones(2000, 2000)
assert float((wide @ wide).sum() + wide.exp().sum()) > 0
work = lambda: (torch.get_num_threads(), float((wide @ wide).sum()), float(wide.add(1).sum()))
assert run_ranks(work, 2, deadline_s=200) == [(1, 8e9, 8e6)] * 2
"""


def test_a_process_that_has_used_its_threads_can_be_forked() -> None:
    """The threads of OpenMP do not live on in a fork, which would wait for them for ever."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", POOL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tests_have_one_thread_whatever_the_shell_exports() -> None:
    """And torch is asked, not only the variable."""
    code = "import torch, conftest, os; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    path = os.pathsep.join([str(TESTS), *sys.path])  # other folders have a conftest too
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"], done.stderr[-2000:]
    assert torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"


def test_the_folder_of_a_session_that_was_killed_goes_with_the_next(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """And no other: neither a live session's nor anybody else's."""
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    prefix = conftest.PREFIX
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"{prefix}{ended.pid}_abc", f"{prefix}{os.getpid()}_abc", f"{prefix}abc_def", f"other_{ended.pid}_abc"]
    for name in names:
        (tmp_path / name / "below").mkdir(parents=True)
    conftest.remove_ended_sessions(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
