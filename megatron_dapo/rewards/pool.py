"""Scoring in worker processes that can be killed, with a wall-clock limit a sample.

A verifier may hang, crash or be killed for memory; only the sample it was looking at is lost, with status
``timeout`` or ``error``. The limit is the parent's clock and SIGKILL: no signal handler, so it holds in any
thread and in C code. Workers are fresh interpreters (the parent may hold torch threads, which a fork would
break) that import neither torch nor megatron; ``rewards.worker`` is their side.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards.registry import REWARDS, RewardResult, module_of, prepare_reward, reward_for
from megatron_dapo.rewards.worker import Reply, Task, judge_task, only_this_process
from megatron_dapo.types import Group, InputError, Sums

PREPARE_LIMIT_S = 120.0
"""Seconds a worker may take to start and to import what a reward needs."""
LARGEST_CHUNK = 64
"""Samples sent to a worker at once, at most; a chunk shrinks while it takes longer than CHUNK_S."""
CHUNK_S = 0.1
MOST_FALSE_STARTS = 3
"""Workers in a row that may die before their first sample; then starting another would not help."""
LOOK_S = 1.0
"""Seconds between two looks at whether a silent worker still lives: a child of it may hold its end of the pipe."""
LONGEST_REPLY = 64 << 20
"""Bytes without an end of line that are no reply any more."""
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from megatron_dapo.rewards.worker import work; work(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Fault:
    """A sample that got no verdict: ``kind`` is raised, malformed, timeout or died; ``what`` may be a traceback."""

    reward: str
    kind: str
    what: str
    answer: str
    response: str


OnFault = Callable[[Fault], None]


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Connection[Any, Any]  # tasks to it
    replies: int  # the pipe that it writes to
    text: bytearray = field(default_factory=bytearray)  # read, and not yet a whole line
    tasks: deque[int] = field(default_factory=deque)  # serial numbers, in the order they are worked on
    chunk: int = 4
    proven: bool = False  # it got as far as a sample, ever
    begun: float | None = None  # when it started on its chunk; None while it prepares
    deadline: float = math.inf

    def read(self) -> tuple[list[bytes], bool]:
        """Lines that have arrived, never waiting for the rest of one; and whether more can come."""
        piece = b"?"
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                self.text += (piece := os.read(self.replies, 1 << 16))
                if not piece:
                    break
        *lines, rest = bytes(self.text).split(b"\n")
        self.text = bytearray(rest)
        return lines, bool(piece) and len(rest) < LONGEST_REPLY


@dataclass
class _Batch:
    """What one ``score`` is about, by serial number."""

    tasks: dict[int, Task]
    first: set[int]  # the very first sample of each reward
    pending: deque[int]
    results: dict[int, RewardResult] = field(default_factory=dict)


class RewardPool:
    """Scores groups in ``options.reward_num_workers`` processes; use it as a context manager.

    Workers start with the first batch and are reused until ``close``; they end by themselves when the parent
    is gone. With 0 workers rewards run in this process, one after the other, without any limit. ``on_fault`` is called with
    of every sample that got no verdict, at once.

    Example::

        with RewardPool(options.reward) as pool:
            sums = pool.score(groups)
    """

    def __init__(self, options: RewardOptions, on_fault: OnFault | None = None) -> None:
        if options.reward != "auto":
            REWARDS[options.reward]
        self._options = options
        self._on_fault = on_fault or (lambda fault: None)
        self._workers: list[_Worker] = []
        self._serial = 0
        self._known: set[str] = set()  # rewards that have judged a sample before
        self._false_starts = 0
        self._lock = threading.Lock()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill all workers. A later ``score`` starts new ones."""
        for worker in self._workers:
            _kill(worker)
        self._workers = []

    def score(self, groups: list[Group]) -> Sums:
        """Fill ``score``, ``acc``, ``prediction`` and ``status`` of every sample, in place.

        Returns: ``reward/{no_answer,timeout,error}`` as (count, samples), ``reward/seconds`` as (seconds, 1).
        Raises: ``InputError`` for an unknown reward, a row that its reward cannot use, or a reward that returns no verdict on
        the very first sample it judges.
        """
        started = time.monotonic()
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            return {}
        batch = self._batch(groups)
        with self._lock:
            (self._in_workers if self._options.reward_num_workers else self._here)(batch)
        self._known |= {task.reward for task in batch.tasks.values()}
        for sample, serial in zip(samples, batch.tasks, strict=True):
            result = batch.results[serial]
            sample.score, sample.acc = result.score, result.acc
            sample.prediction, sample.status = result.prediction, result.status
        sums: Sums = {}
        for status in ("no_answer", "timeout", "error"):
            count = sum(sample.status == status for sample in samples)
            sums[f"reward/{status}"] = (float(count), float(len(samples)))
        sums["reward/seconds"] = (time.monotonic() - started, 1.0)
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Which rewards have judged a sample: a fault of theirs is no longer one of the very first."""
        return {"known": sorted(self._known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._known = set(state["known"])

    def _batch(self, groups: list[Group]) -> _Batch:
        batch = _Batch({}, set(), deque())
        new: dict[str, int] = {}
        for group in groups:
            prompt = group.prompt
            name = reward_for(prompt, self._options)
            module = module_of(name)
            if module == "__main__" and self._options.reward_num_workers:
                raise InputError(f"--reward {name}: workers cannot import the main script; put it in a module")
            if name not in self._known:
                new.setdefault(name, self._serial)
            for sample in group.samples:
                batch.tasks[self._serial] = Task(self._serial, name, module, sample.text, prompt.answer, prompt.extra)
                self._serial += 1
        batch.first.update(new.values())
        batch.pending.extend(batch.tasks)
        return batch

    def _here(self, batch: _Batch) -> None:
        for name in {task.reward for task in batch.tasks.values()}:
            with only_this_process():
                prepare_reward(name)
        for task in batch.tasks.values():
            self._settle(batch, judge_task(task, self._options))

    def _in_workers(self, batch: _Batch) -> None:
        try:
            while len(batch.results) < len(batch.tasks):
                self._dispatch(batch)
                busy = [worker for worker in self._workers if worker.tasks]
                patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                ready = wait([worker.replies for worker in busy], min(patience, LOOK_S))
                now = time.monotonic()
                for worker in busy:
                    if worker.replies in ready or worker.process.poll() is not None:
                        self._receive(worker, batch)
                    elif worker.deadline <= now:
                        self._replace(worker, batch)
        except BaseException:
            self.close()  # what the workers still hold belongs to a batch nobody waits for
            raise

    def _dispatch(self, batch: _Batch) -> None:
        """Give every idle worker a chunk; start workers that are missing."""
        pending = batch.pending
        wanted = min(self._options.reward_num_workers, len(self._workers) + len(pending))
        while len(self._workers) < wanted:
            self._workers.append(_start(self._options))
        share = math.ceil(len(pending) / self._options.reward_num_workers)
        for worker in list(self._workers):
            if worker.tasks or not pending:
                continue
            chunk = [pending.popleft() for _ in range(min(worker.chunk, share, len(pending)))]
            worker.tasks.extend(chunk)
            worker.begun, worker.deadline = None, time.monotonic() + PREPARE_LIMIT_S
            # A worker that died while idle fails here or at the next read: the read notices both.
            with contextlib.suppress(OSError):
                worker.channel.send([batch.tasks[serial] for serial in chunk])

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        """Take what a worker has sent. A reply to anything but its current task is nobody's and is passed over."""
        alive = worker.process.poll() is None  # asked before reading: what a dead worker has sent is all there then
        lines, goes_on = worker.read()
        goes_on &= alive
        for line in lines:
            reply = Reply.parse(line)
            if reply is None:
                goes_on = False
                break
            if not worker.tasks or reply.serial != worker.tasks[0]:
                continue
            now = time.monotonic()
            worker.deadline = now + self._options.reward_timeout_s
            if reply.kind == "begin":
                worker.begun, worker.proven = now, True
            elif reply.kind == "refusal":
                raise InputError(reply.fault)
            else:
                worker.tasks.popleft()
                self._settle(batch, reply)
        if not goes_on:
            self._replace(worker, batch)
        elif not worker.tasks and worker.begun is not None:
            self._false_starts = 0
            slow = time.monotonic() - worker.begun > CHUNK_S
            worker.chunk = max(1, worker.chunk // 2) if slow else min(LARGEST_CHUNK, worker.chunk * 2)

    def _settle(self, batch: _Batch, reply: Reply) -> None:
        """Keep a verdict. What is none is one sample's error; on a reward's very first sample it is the user's mistake."""
        assert reply.serial not in batch.results, "a sample was scored twice"
        if reply.malformed and reply.serial in batch.first:
            raise InputError(reply.fault)
        batch.results[reply.serial] = reply.result
        if reply.status == "error":
            self._tell(batch.tasks[reply.serial], "malformed" if reply.malformed else "raised", reply.fault)

    def _tell(self, task: Task, kind: str, what: str) -> None:
        self._on_fault(Fault(task.reward, kind, what, task.answer, task.response))

    def _replace(self, worker: _Worker, batch: _Batch) -> None:
        """Bury a dead or overdue worker: its current sample takes the blame, the others go back in line."""
        overdue = worker.deadline <= time.monotonic()
        code = _kill(worker)
        self._workers.remove(worker)
        if worker.begun is None:
            self._false_starts += not worker.proven
            if self._false_starts > MOST_FALSE_STARTS:
                raise RuntimeError(f"reward workers die before their first sample (exit status {code}); see stderr")
        elif worker.tasks:
            serial = worker.tasks.popleft()
            late = code == -signal.SIGALRM or (overdue and code == -signal.SIGKILL)
            batch.results[serial] = RewardResult.unscored("timeout" if late else "error")
            limit = f"no verdict within --reward-timeout-s {self._options.reward_timeout_s:g}"
            ended = limit if late else f"it ended its process or wrote to the pool's pipe (exit status {code})"
            self._tell(batch.tasks[serial], "timeout" if late else "died", ended)
        batch.pending.extendleft(reversed(worker.tasks))
        worker.tasks.clear()


def _start(options: RewardOptions) -> _Worker:
    theirs, ours = Pipe(duplex=False)
    replies, reply_to = os.pipe()
    os.set_blocking(replies, False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(reply_to), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), reply_to),
        env=environment,
        start_new_session=True,  # Ctrl-C is the parent's business, and a verifier's children die with it
    )
    theirs.close()
    os.close(reply_to)
    with contextlib.suppress(OSError):  # it died already: the first read says so
        ours.send(options)
    return _Worker(process, ours, replies)


def _kill(worker: _Worker) -> int:
    """Kill a worker and the processes it started; its exit status (negative: the signal that ended it)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.channel.close()
    os.close(worker.replies)
    return worker.process.wait()
