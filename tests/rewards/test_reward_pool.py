from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_plugins import NOT_VERDICTS

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import RewardPool
from megatron_dapo.rewards.pool import Fault
from megatron_dapo.rewards.worker import Reply
from megatron_dapo.types import Group, InputError, Prompt, Sample

SCRIPTED = RewardOptions(reward="reward_plugins:scripted", reward_timeout_s=2.0)
pytestmark = pytest.mark.timeout(300)


def group(texts: list[str], answer: str = "x", source: str = "any", extra: dict[str, Any] | None = None) -> Group:
    samples = [Sample(np.array([1]), np.array([0.0]), "stop", 0, text) for text in texts]
    return Group(Prompt("p0", "q", (1,), answer, source, extra or {}), samples, 0)


def statuses(batch: Group) -> list[tuple[str, float, float]]:
    return [(s.status, s.acc, s.score) for s in batch.samples]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


RIGHT, WRONG = ("ok", 1.0, 1.0), ("ok", 0.0, -1.0)
TIMEOUT, ERROR = ("timeout", 0.0, -1.0), ("error", 0.0, -1.0)


def test_a_fault_costs_its_own_sample_only() -> None:
    expected = {
        "sleep 60": TIMEOUT,  # verl#5839
        "spin": TIMEOUT,
        "die": ERROR,
        "exit 0": ERROR,
        "quit": ERROR,
        "raise": ERROR,
        "alarm": WRONG,  # a verifier's own SIGALRM does no harm: verl#1331
        "print": WRONG,
        "y": WRONG,
        "x": RIGHT,
    }
    texts = ["x", "x", *(text for order in expected for text in (order, "x", "y"))]
    batch = group(texts)
    with RewardPool(SCRIPTED) as pool:
        sums = pool.score([batch])
    assert statuses(batch) == [expected[text] for text in texts]
    assert sums["reward/timeout"] == (2.0, float(len(texts)))
    assert sums["reward/error"] == (4.0, float(len(texts)))
    assert sums["reward/no_answer"] == (0.0, float(len(texts)))
    assert sums["reward/seconds"][0] > 2.0 and sums["reward/seconds"][1] == 1.0


def test_order_and_once_only_across_deaths(tmp_path: Path) -> None:
    texts = [f"log {i}" for i in range(400)]
    texts[37], texts[205], texts[399] = "exit 1", "die", "sleep 60"
    extra = {"path": str(tmp_path / "seen")}
    batches = [group(texts[i : i + 16], answer=texts[i], extra=extra) for i in range(0, 400, 16)]
    with RewardPool(SCRIPTED) as pool:
        pool.score(batches)
    samples = [s for batch in batches for s in batch.samples]
    odd = {37: "error", 205: "error", 399: "timeout"}
    assert [s.status for s in samples] == [odd.get(i, "ok") for i in range(400)]
    assert [s.prediction for s in samples] == ["" if i in odd else texts[i] for i in range(400)]
    assert [s.acc for s in samples] == [float(i % 16 == 0) for i in range(400)]
    seen = Counter((tmp_path / "seen").read_text().split())
    assert seen == Counter(str(i) for i in range(400) if i not in odd)


def test_workers_are_reused_and_end_with_the_pool() -> None:
    with RewardPool(SCRIPTED) as pool:
        pool.score([group(["x"] * 50)])
        pids = pool.worker_pids
        pool.score([group(["x"] * 50)])
        assert pool.worker_pids == pids and len(pids) == 2
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


def test_workers_are_fresh_processes_without_torch() -> None:
    import torch

    torch.ones(4).sum()
    batch = group(["a", "b", "c", "d"])
    with RewardPool(RewardOptions(reward="reward_plugins:describe_process")) as pool:
        pool.score([batch])
        pids = pool.worker_pids
    assert statuses(batch) == [RIGHT] * 4
    for sample in batch.samples:
        pid, parent = map(int, sample.prediction.split())
        assert pid in pids and parent == os.getpid()


def test_scoring_from_another_thread() -> None:
    batch = group(["x", "sleep 60", "y"])
    with RewardPool(SCRIPTED) as pool:
        thread = threading.Thread(target=pool.score, args=([batch],))
        thread.start()
        thread.join(240)
        assert not thread.is_alive()
        pool.score([group(["x"])])  # the workers outlive the thread that started them
    assert statuses(batch) == [RIGHT, TIMEOUT, WRONG]


def test_workers_killed_while_idle_blame_no_sample() -> None:
    with RewardPool(SCRIPTED) as pool:
        pool.score([group(["x"] * 20)])
        dead = pool.worker_pids
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        batch = group(["x"] * 20)
        pool.score([batch])
        assert statuses(batch) == [RIGHT] * 20
        assert not set(pool.worker_pids) & set(dead)


def test_the_signal_that_asks_a_job_to_stop_costs_no_sample_its_verdict() -> None:
    """Slurm sends it to every process of the trainer's step; the step in hand is finished."""
    batch = group(["stop_signal", "x", "y"])
    with RewardPool(SCRIPTED) as pool:
        pool.score([batch])
    assert statuses(batch) == [WRONG, RIGHT, WRONG]


def test_children_of_a_verifier_die_with_it(tmp_path: Path) -> None:
    batch = group([f"hang_with_child {tmp_path / 'pid'}"])
    with RewardPool(SCRIPTED) as pool:
        pool.score([batch])
    child = int((tmp_path / "pid").read_text())
    assert statuses(batch) == [TIMEOUT]
    assert eventually(lambda: not alive(child), 120.0)


FORKS = RewardOptions(reward="reward_plugins:forks", reward_timeout_s=3.0)
CHILDREN = ("returns", "raises", "exits", "refuses", "garbage", "shouts", "lingers", "session")


def own_verdicts(batch: Group) -> list[bool]:
    """Which samples got the verdict on their own response."""
    return [s.prediction == s.text and s.status == "ok" and s.acc == float(s.text == "x") for s in batch.samples]


@pytest.mark.parametrize("fork", ["fork", "cfork"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_reward_that_forks_shifts_no_verdict(fork: str, workers: int) -> None:
    """Whatever the child does: return, raise, exit, refuse, write what it can, come back late or in its own session."""
    repeats = 8 if fork == "fork" else 2
    texts = [
        t for i in range(repeats) for child in CHILDREN for t in ("x", f"{fork} {child} {i}", f"plain {child} {i}")
    ]
    batch, after = group(texts), group([*texts[:30], "x"])
    with RewardPool(replace(FORKS, reward_num_workers=workers)) as pool:
        pool.score([batch])
        pool.score([after])
    assert fork == "cfork" or all(own_verdicts(batch) + own_verdicts(after))
    # A fork that passes Python by inherits the pipe: what it writes may cost a sample its verdict, never swap one.
    for sample, own in zip(batch.samples + after.samples, own_verdicts(batch) + own_verdicts(after), strict=True):
        assert own or (sample.status in ("error", "timeout") and sample.prediction == "")


def test_a_reward_that_forks_and_ends_its_process_costs_one_sample() -> None:
    """The child outlives the worker, and where fork passed Python by holds the worker's end of the pipe: no time-out."""
    texts = ["x", "fork dies", "x", "cfork dies", "y", "cfork session", "x"]
    batch = group(texts)
    with RewardPool(replace(FORKS, reward_timeout_s=30.0)) as pool:
        pool.score([batch])
    assert [s.status for s in batch.samples] == ["error" if "dies" in text else "ok" for text in texts]
    assert [own for own, text in zip(own_verdicts(batch), texts, strict=True) if "dies" not in text] == [True] * 5


def test_without_workers_a_child_of_a_reward_never_comes_back(tmp_path: Path) -> None:
    batch = group(["x", "fork returns", "fork raises", "fork exits", "fork refuses", "y"])
    owner = os.getpid()
    with RewardPool(replace(FORKS, reward_num_workers=0)) as pool:
        pool.score([batch])
    (tmp_path / str(os.getpid())).touch()
    time.sleep(0.1)
    assert [p.name for p in tmp_path.iterdir()] == [str(owner)] and all(own_verdicts(batch))


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\n",
        b"\xff\x00\xff\xff",  # half a line, or in another protocol the length of a message that never comes
        b"\n",
        b"[]\n",
        b"1\n",
        b'{"kind": "verdict"}\n',
        b"[" * 100_000 + b"\n",
        Reply("verdict", 10**9, 1.0, 1.0, "not asked for").line(),
        Reply("verdict", 0, 1.0, 1.0, "once more").line(),
        Reply("verdict", -1, 1.0, 1.0, "before").line(),
    ],
)
def test_what_is_no_reply_costs_its_own_sample_at_most(data: bytes) -> None:
    texts = ["x", "y", "scribble", "x", "y", "z"] * 4
    batch = group(texts, extra={"bytes": data})
    with RewardPool(RewardOptions(reward="reward_plugins:scribbles", reward_timeout_s=1.0)) as pool:
        pool.score([batch])
    for sample, own in zip(batch.samples, own_verdicts(batch), strict=True):
        assert own or (sample.text == "scribble" and sample.status in ("error", "timeout")), sample.text


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_no_verdict_is_one_samples_error_but_not_on_the_first(workers: int) -> None:
    options = RewardOptions(reward="reward_plugins:returns", reward_num_workers=workers)
    numbers = ["numpy", "bool", "int"]
    texts = ["x", *(t for name in NOT_VERDICTS for t in (name, "x")), *numbers]
    faults: list[Fault] = []
    batch = group(texts)
    with RewardPool(options, faults.append) as pool:
        sums = pool.score([batch])
        state = pool.state_dict()
    expected = {name: ERROR for name in NOT_VERDICTS}
    assert statuses(batch) == [expected.get(text, RIGHT) for text in texts]
    assert all(type(s.score) is float and type(s.acc) is float for s in batch.samples)
    assert sums["reward/error"] == (float(len(NOT_VERDICTS)), float(len(texts)))
    assert {(f.kind, f.response) for f in faults} == {("malformed", name) for name in NOT_VERDICTS}
    assert all("--reward reward_plugins:returns: it returned" in f.what and "\n" not in f.what for f in faults)
    with RewardPool(options) as resumed:  # a resumed run does not take the same sample for its first
        resumed.load_state_dict(state)
        again = group(["nan", "x"])
        resumed.score([again])
        assert statuses(again) == [ERROR, RIGHT]


@pytest.mark.parametrize("name", NOT_VERDICTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_very_first_sample_shows_the_users_mistake(workers: int, name: str) -> None:
    with (
        RewardPool(RewardOptions(reward="reward_plugins:returns", reward_num_workers=workers)) as pool,
        pytest.raises(InputError, match="--reward reward_plugins:returns: it returned") as raised,
    ):
        pool.score([group([name, "x", "x"])])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_every_kind_of_fault_is_told_with_its_sample() -> None:
    faults: list[Fault] = []
    with RewardPool(SCRIPTED, faults.append) as pool:
        pool.score([group(["x", "raise", "spin", "die", "quit", "y"], answer="x")])
    assert {(f.response, f.kind) for f in faults} == {
        ("raise", "raised"), ("spin", "timeout"), ("die", "died"), ("quit", "raised")
    }  # fmt: skip
    told = {f.response: f.what for f in faults}
    assert told["raise"].startswith("Traceback") and told["raise"].rstrip().endswith("ZeroDivisionError: verifier bug")
    assert "reward_plugins.py" in told["raise"] and "SystemExit: 3" in told["quit"]
    assert "--reward-timeout-s 2" in told["spin"] and "exit status -9" in told["die"]
    assert all(f.answer == "x" and f.reward == "reward_plugins:scripted" for f in faults)


PARENT = """
import sys, threading, time
import numpy as np
from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import RewardPool
from megatron_dapo.types import Group, Prompt, Sample
pool = RewardPool(RewardOptions(reward="reward_plugins:scripted", reward_timeout_s=2.0))
def score(*texts):
    samples = [Sample(np.array([1]), np.array([0.0]), "stop", 0, text) for text in texts]
    pool.score([Group(Prompt("p", "q", (1,), "x", "any"), samples, 0)])
score("x", "y")
threading.Thread(target=score, args=("spin",)).start()
time.sleep(0.3)
print(*pool.worker_pids, flush=True)
time.sleep(600)
"""


def test_workers_do_not_outlive_a_killed_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.wait()
    assert len(pids) == 2
    assert eventually(lambda: not any(alive(pid) for pid in pids), 120.0)


def test_input_errors_reach_the_caller_and_the_pool_lives_on() -> None:
    with RewardPool(SCRIPTED) as pool:
        with pytest.raises(InputError, match="the row is bad; mend it"):
            pool.score([group(["x"] * 10 + ["input_error"] + ["x"] * 10)])
        batch = group(["x"] * 5)
        pool.score([batch])
        assert statuses(batch) == [RIGHT] * 5


def test_bad_options_fail_at_construction() -> None:
    for options, why in (
        (RewardOptions(reward="mathh"), "did you mean 'math'"),
        (RewardOptions(reward="no_such_module:f"), "no_such_module"),
    ):
        with pytest.raises(InputError, match=why):
            RewardPool(options)


def test_a_worker_that_cannot_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly_import.py").write_text(
        "import os\nif os.environ.get('DEADLY'):\n    os._exit(7)\n\ndef f(*_):\n    raise AssertionError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(RewardOptions(reward="deadly_import:f")) as pool:
        monkeypatch.setenv("DEADLY", "1")
        with pytest.raises(RuntimeError, match="exit status 7"):
            pool.score([group(["x"])])


def test_without_workers_rewards_run_here() -> None:
    batch = group(["x", "y", "raise"])
    with RewardPool(RewardOptions(reward="reward_plugins:scripted", reward_num_workers=0)) as pool:
        sums = pool.score([batch])
        assert pool.worker_pids == []
    assert statuses(batch) == [RIGHT, WRONG, ERROR]
    assert sums["reward/error"] == (1.0, 3.0)
    assert pool.score([]) == {}


def test_rewards_of_several_sources_in_one_batch() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    groups = [
        group(["Answer: 34.", r"\boxed{35}", "?"], answer="34", source="math_dapo"),
        group([r"\boxed{(x+1)(x-1)}", "Answer: x^2-2", "Answer: 1-x^2"], answer="x^2-1", source="math_dapo"),
        group(
            [f"Answer: {entry['answer']}", "Answer: no"],
            answer=entry["answer"],
            source="reasoning_gym/chain_sum",
            extra={"task": "chain_sum", "entry": entry},
        ),
        group(["abc", "ab"], answer="xyz", source="test_same_length"),
    ]
    with RewardPool(RewardOptions(reward_timeout_s=30.0)) as pool:
        sums = pool.score(groups)
    assert statuses(groups[0]) == [RIGHT, WRONG, ("no_answer", 0.0, -1.0)]
    assert statuses(groups[1]) == [RIGHT, WRONG, WRONG]
    assert statuses(groups[2]) == [RIGHT, WRONG]
    assert statuses(groups[3]) == [RIGHT, WRONG]
    assert sums["reward/no_answer"] == (1.0, 10.0)
