"""Ranks from Slurm's variables, and when they are none of our business."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from megatron_dapo.distributed import launcher
from megatron_dapo.distributed.launcher import adopt_slurm_ranks, free_port
from megatron_dapo.types import InputError

TASK = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "13", "SLURM_LOCALID": "5",
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "128", "SLURM_STEP_NODELIST": "n[3-4]", "MASTER_ADDR": "10.0.0.3",
}  # fmt: skip
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def adopted(**changed: str | None) -> dict[str, str]:
    env = {name: value for name, value in {**TASK, **changed}.items() if value is not None}
    adopt_slurm_ranks(env)
    return env


def test_a_task_of_srun_takes_the_ranks_of_its_step_not_of_the_job() -> None:
    env = adopted()
    assert [env[name] for name in RANKS] == ["13", "16", "5"]
    assert env["MASTER_ADDR"] == "10.0.0.3" and 20000 <= int(env["MASTER_PORT"]) < 28000


def test_every_task_of_a_step_agrees_on_the_port_and_two_steps_do_not() -> None:
    assert adopted()["MASTER_PORT"] == adopted(SLURM_PROCID="0", SLURM_LOCALID="0")["MASTER_PORT"]
    assert adopted()["MASTER_PORT"] != adopted(SLURM_STEP_ID="3")["MASTER_PORT"]
    assert adopted(MASTER_PORT="1234")["MASTER_PORT"] == "1234"


def test_what_torchrun_says_wins() -> None:
    env = adopted(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert [env[name] for name in RANKS] == ["1", "2", "1"] and "MASTER_PORT" not in env


@pytest.mark.parametrize("gone", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_a_batch_script_is_no_task(gone: str) -> None:
    assert "RANK" not in adopted(**{gone: None})


def test_a_shell_in_a_step_of_one_task_is_its_own_world() -> None:
    assert "RANK" not in adopted(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")


@pytest.mark.parametrize(("devices", "local"), [("0,1,2,3,4,5,6,7", "5"), ("5", "0"), ("", "5"), (None, "5")])
def test_a_task_that_sees_one_gpu_alone_calls_it_its_first(devices: str | None, local: str) -> None:
    assert adopted(CUDA_VISIBLE_DEVICES=devices)["LOCAL_RANK"] == local


def test_without_a_first_node_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"SLURM_STEP_NODELIST='n\[3-4\]'.*set MASTER_ADDR"):
        adopted(MASTER_ADDR=None)


def test_a_free_port_is_none_that_an_outgoing_connection_could_take() -> None:
    """A server of ours found its port taken a minute after it was chosen out of that range."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    state = random.getstate()
    found = {free_port() for _ in range(20)}
    assert len(found) > 1 and min(found) >= launcher.FIRST_PORT
    assert max(found) < first or first <= launcher.FIRST_PORT, "a machine may hand out all of its ports"
    assert random.getstate() == state, "a run's generators are its own"


def test_a_free_port_is_one_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", free_port()))
        held.listen()
        taken = held.getsockname()[1]
        monkeypatch.setattr(launcher, "FIRST_PORT", taken)
        monkeypatch.setattr(launcher, "PORTS", 1)
        with pytest.raises(OSError, match=f"no free port between {taken}"):
            free_port()
