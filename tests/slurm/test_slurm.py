"""The very scripts people submit, on a real Slurm of four nodes; and what they print in a dry run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, cluster, missing_programs
from served import LAYERS, save_served_model, write_served_task
from tolerances import logprob_bound

ROOT = Path(__file__).parents[2]
SCRIPT = "slurm/dapo_qwen32b.sh"
GOLDEN = Path(__file__).parent / "dry_run.txt"
needs_slurm = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"no {missing_programs()} here: apt-get install slurmctld slurmd slurm-client munge",
)


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[Cluster]:
    with cluster(4) as found:
        yield found


def free_ports() -> int:
    """A port of which nobody uses it nor the tenth after it, below those that systems hand out to outgoing connections."""
    return next(port for port in range(28500, 32000, 20) if is_free(port) and is_free(port + 10))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def submit(slurm: Cluster, folder: Path, *flags: str, **environment: str) -> str:
    """The number of a job that runs our script as users submit it: from the project's folder, changed by variables alone."""
    ours = {"RECIPE": str(folder / "recipe.toml"), "HF_CHECKPOINT": str(folder / "hf"), "RUN_DIR": str(folder / "run")}
    size = {"GPUS_PER_NODE": "2", "GPUS_PER_SERVER": "2", "ROLLOUT_NODES": "2", "SERVER_PORT": str(free_ports())}
    variables = {**size, **ours, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    words = ["sbatch", "--parsable", "--nodes=4", f"--chdir={ROOT}", f"--output={folder}/job.out", SCRIPT, *flags]
    return slurm.run(*words, cwd=ROOT, **variables).strip()


def write_job(folder: Path) -> None:
    """Model, tokenizer, problems and recipe of a run of two steps."""
    save_served_model(folder / "hf")
    write_served_task(folder, folder / "hf", None, tensor_model_parallel_size=2, tokenizer_model=None)
    shutil.copytree(folder / "tokenizer", folder / "hf", dirs_exist_ok=True)


def ours_alive(folder: Path) -> list[list[str]]:
    """Command lines of live processes that name the job's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and "slurmstepd" not in words[0]:
            found.append(words)
    return found


@needs_slurm
def test_the_script_trains_on_four_nodes_until_it_is_told_to_stop(four_nodes: Cluster, tmp_path: Path) -> None:
    """Slurm's warning before the time limit is a TERM for the script alone: the step in hand is finished and saved."""
    write_job(tmp_path)
    flags = ["--num-rollout", "1000", "--sglang-skip-tokenizer-init", "--sglang-max-total-tokens", "8192"]
    job = submit(four_nodes, tmp_path, *flags, "--save-interval", "1000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    four_nodes.wait_until(job, lambda: metrics.is_file() and "actor/pg_loss" in metrics.read_text(), within_s=500)
    four_nodes.run("scancel", "--batch", "--signal=TERM", job)
    state = four_nodes.wait_for(job, within_s=500)
    said = (tmp_path / "job.out").read_text()
    logs = tmp_path / "run" / "logs" / job
    assert state == ("COMPLETED", "0:0"), said + (logs / "train_0.log").read_text()[-3000:]

    assert "training on n1 n2; generating on n3 n4" in said and "all servers answer" in said
    assert "told to stop: the trainer saves and ends" in said
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [step for step in steps if "actor/pg_loss" in step]
    assert 0 < len(steps) < 1000
    saved = int((tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved == steps[-1]["step"] == len(steps)
    bound = logprob_bound(LAYERS, [8.0])  # of 25 ids, by a policy that has hardly been trained
    assert all(step["mismatch/logprob_abs_diff/max"] <= bound for step in steps)
    assert sorted(path.name for path in logs.glob("train_*.log")) == [f"train_{rank}.log" for rank in range(4)]
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env["world_size"] == 4
    assert not ours_alive(tmp_path)


@needs_slurm
def test_servers_that_do_not_come_up_are_named_and_the_job_fails(four_nodes: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path)
    port = free_ports()
    job = submit(four_nodes, tmp_path, SERVER_WAIT_S="1", SERVER_PORT=str(port))
    state, code = four_nodes.wait_for(job, within_s=500)
    said = (tmp_path / "job.out").read_text()
    assert (state, code) == ("FAILED", "2:0"), said
    assert (
        f"no answer: http://127.0.0.1:{port} on n3" in said and f"no answer: http://127.0.0.1:{port + 10} on n4" in said
    )
    assert "2 of 2 servers are not up after 1 s; raise SERVER_WAIT_S" in said
    assert not ours_alive(tmp_path)


@needs_slurm
def test_a_flag_that_is_refused_ends_the_job_before_any_server_starts(four_nodes: Cluster, tmp_path: Path) -> None:
    write_job(tmp_path)
    job = submit(four_nodes, tmp_path, "--eps-clip-hihg", "0.3")
    state, code = four_nodes.wait_for(job, within_s=500)
    said = (tmp_path / "job.out").read_text()
    assert (state, code) == ("FAILED", "2:0"), said
    assert "the plan is refused" in said and "--eps-clip-hihg" in said and "did you mean" in said
    assert "megatron_dapo serve" not in said


def dry_run(*flags: str, ok: bool = True, **environment: str) -> str:
    """What DRY_RUN=1 prints, without times and without this machine's folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"DRY_RUN": "1", "PYTHON": "python3", **environment}
    done = subprocess.run(["bash", SCRIPT, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    return "".join(line.partition("] ")[2] + "\n" if line.startswith("[2") else line + "\n" for line in lines)


def test_a_dry_run_prints_every_command_of_the_default_job() -> None:
    """After a change that is meant: DRY_RUN=1 PYTHON=python3 bash slurm/dapo_qwen32b.sh --lr 5e-7, without the times."""
    assert dry_run("--lr", "5e-7") == GOLDEN.read_text()


def test_a_dry_run_follows_the_environment() -> None:
    said = dry_run(
        NODES="3", ROLLOUT_NODES="1", GPUS_PER_SERVER="8", SRUN_FLAGS="--container-image=a.sqsh --no-container-mount-home",
        RECIPE="examples/dapo_qwen7b.toml", HF_CHECKPOINT="models/a b", PROMPT_DATA="one.parquet two.parquet",
    )  # fmt: skip
    commands = [line for line in said.splitlines() if line.startswith("+ ")]
    assert len(commands) == 3
    assert all(line.startswith("+ srun --container-image=a.sqsh --no-container-mount-home ") for line in commands)
    assert all("examples/dapo_qwen7b.toml" in line and r"models/a\ b" in line for line in commands)
    plan, serve, train = commands
    assert "--nodelist=node-2" in serve and "--rollout-num-servers 1 --rollout-num-gpus-per-engine 8" in serve
    for line in (plan, train):
        assert "--rollout-server-urls http://node-2:30000 --prompt-data one.parquet two.parquet" in line
    assert "--nodes=2 --ntasks=16 --ntasks-per-node=8" in train


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"ROLLOUT_NODES": "16"}, "ROLLOUT_NODES=16 of 16 nodes: give at least one node to generation and one to training"),
        ({"ROLLOUT_NODES": "0"}, "ROLLOUT_NODES=0 of 16 nodes"),
        ({"GPUS_PER_SERVER": "3"}, "GPUS_PER_SERVER=3 does not divide GPUS_PER_NODE=8: a server lives on one node"),
        ({"DRY_RUN": "0"}, "this is no Slurm job: submit it with sbatch, or look at it with DRY_RUN=1"),
        ({"DAPO_HOME": "/nowhere"}, "no slurm/common.sh in /nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_in_a_sentence(environment: dict[str, str], says: str) -> None:
    assert says in dry_run(ok=False, **environment)
