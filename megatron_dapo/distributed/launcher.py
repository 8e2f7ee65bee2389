"""Who this process is: torchrun says so in RANK and its fellows, Slurm in names of its own. And where others find it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import MutableMapping

from megatron_dapo.types import InputError

FIRST_PORT, PORTS = 20000, 8000
"""Where our ports lie: below the range that systems hand out to outgoing connections. A server takes a minute to listen on
the port it was given, long enough for one out of that range to be taken by then."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks a process to finish and end. USR1 is for steps of a Slurm job: srun passes it on, and answers TERM with KILL."""


def adopt_slurm_ranks(env: MutableMapping[str, str] = os.environ) -> None:
    """In a task that ``srun`` started, set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from Slurm's variables.

    What is set already stays, so torchrun's word wins. A batch script or an allocation without ``srun`` is no task: the
    process is its own world there, whatever the size of the job.

    Raises:
        InputError: there are several tasks, and where the first one runs is not to be found out.
    """
    if "RANK" in env or "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))
    if int(tasks) == 1:
        return
    local = env.get("SLURM_LOCALID", "0")
    devices = env.get("CUDA_VISIBLE_DEVICES", "")
    if devices and "," not in devices:
        local = "0"  # Slurm gave the task one GPU of its own, which is its first
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _first_node(env.get("SLURM_STEP_NODELIST", ""))
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(FIRST_PORT + (job * 16 + step) % PORTS))
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=tasks, LOCAL_RANK=local)


def free_port() -> int:
    """A port between FIRST_PORT and FIRST_PORT + PORTS that nobody uses now, on any address of this machine.

    Raises:
        OSError: there is none.
    """
    generator = random.SystemRandom()  # the run's own stays as it is
    for port in generator.sample(range(FIRST_PORT, FIRST_PORT + PORTS), PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port between {FIRST_PORT} and {FIRST_PORT + PORTS}")


def _first_node(nodes: str) -> str:
    """The first host of Slurm's short form, as ``n[3-6]``."""
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return shown.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise InputError(
            f"which node has rank 0? scontrol says nothing about SLURM_STEP_NODELIST={nodes!r} ({error}); set MASTER_ADDR"
        ) from error
