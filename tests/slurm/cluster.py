"""A real Slurm of several nodes on one machine: munged, slurmctld and a slurmd a node, started and ended by process id.

The daemons live in a folder of their own, with a key, a socket and ports of their own: they meet no other Slurm.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.distributed.launcher import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
UP_S = 300
USER = pwd.getpwuid(os.geteuid()).pw_name
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=10
GresTypes=gpu
"""


def missing_programs() -> str:
    """Which of Slurm's programs this machine lacks."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name) is None)


@dataclass
class Cluster:
    """``nodes`` nodes n1, n2 ... in ``root``, with ``gpus`` made-up GPUs each (plain files)."""

    root: Path
    nodes: int
    gpus: int = 8

    def __post_init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        shell = {name: value for name, value in os.environ.items() if name not in RANKS}  # who submits is no rank
        self.environment = {**shell, "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """Every daemon up and every node idle."""
        for folder in ("state", "spool", "munge"):
            (self.root / folder).mkdir()
        self._start_munge()
        self._write_conf()
        self._launch("slurmctld", "-D", "-c")
        for node in self.names():
            (self.root / "spool" / node).mkdir()
            self._launch("slurmd", "-D", "-N", node)
        self._wait_until(self._all_idle, "nodes that are idle")

    def names(self) -> list[str]:
        return [f"n{number + 1}" for number in range(self.nodes)]

    def _start_munge(self) -> None:
        """munged refuses to be root: it runs as its own user where we are."""
        folder = self.root / "munge"
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        words = ["munged", "--foreground", f"--socket={folder}/socket", f"--key-file={key}", f"--pid-file={folder}/pid"]
        words += [f"--log-file={folder}/log", f"--seed-file={folder}/seed"]
        if os.geteuid() == 0:
            for path in (folder, key):
                shutil.chown(path, "munge", "munge")
            words = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", *words]
        folder.chmod(0o755)
        self._launch(*words)
        self._wait_until((folder / "socket").exists, "munged's socket")

    def _write_conf(self) -> None:
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(host=host, port=free_port(), root=self.root, user=USER)
        for node in self.names():
            conf += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
            conf += f"CPUs=2 RealMemory=4000 Gres=gpu:{self.gpus} State=UNKNOWN\n"
        conf += f"PartitionName=main Nodes={','.join(self.names())} Default=YES MaxTime=INFINITE State=UP\n"
        (self.root / "slurm.conf").write_text(conf)
        for number in range(self.gpus):
            (self.root / f"gpu{number}").touch()
        gres = f"NodeName=n[1-{self.nodes}] Name=gpu File={self.root}/gpu[0-{self.gpus - 1}]\n"
        (self.root / "gres.conf").write_text(gres)

    def _launch(self, *words: str) -> None:
        with open(self.root / f"{len(self.processes)}.out", "wb") as log:
            self.processes.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, cwd=self.root))

    def _all_idle(self) -> bool:
        shown = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return shown.split() == ["idle"] * self.nodes

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + UP_S
        while not condition():
            ended = [process.args for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"no {what}; ended: {ended}; {self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of every daemon's log."""
        files = [*self.root.glob("*.log"), *self.root.glob("*.out"), *self.root.glob("munge/log")]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in files)

    def run(self, *words: str, check: bool = True, cwd: Path | None = None, **environment: str) -> str:
        """What one of Slurm's commands prints, asked in ``cwd`` with these variables besides."""
        env = {**self.environment, **environment}
        done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=500)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def state_of(self, job: str) -> tuple[str, str]:
        """State and exit code of a job, as COMPLETED and 0:0."""
        words = dict(
            word.split("=", 1) for word in self.run("scontrol", "--oneliner", "show", "job", job).split() if "=" in word
        )
        return words["JobState"], words["ExitCode"]

    def wait_for(self, job: str, within_s: float) -> tuple[str, str]:
        """State and exit code of a job that has ended."""
        deadline = time.monotonic() + within_s
        while (state := self.state_of(job))[0] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"job {job} is {state[0]} after {within_s} s\n{self.logs()}"
            time.sleep(0.3)
        return state

    def wait_until(self, job: str, condition: Callable[[], bool], within_s: float) -> None:
        """Return when ``condition`` holds, or when the job has ended."""
        deadline = time.monotonic() + within_s
        while not condition() and self.state_of(job)[0] in ("PENDING", "CONFIGURING", "RUNNING"):
            assert time.monotonic() < deadline, f"job {job}: not within {within_s} s\n{self.logs()}"
            time.sleep(0.3)

    def close(self) -> None:
        """End the daemons, the jobs' before the controller's, and it before munged."""
        with contextlib.suppress(Exception):
            self.run("scancel", "--user", USER)
            self._wait_until(lambda: not self.run("squeue", "--noheader"), "end of the jobs")
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """A cluster that is up while the context is. Its folder is short, for sockets, and open, for munge's user."""
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    root.chmod(0o755)
    found = Cluster(root, nodes)
    try:
        found.start()
        yield found
    finally:
        found.close()
        shutil.rmtree(root, ignore_errors=True)
