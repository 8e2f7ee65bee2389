"""Scoring in worker processes that can be killed, with a wall-clock limit a sample.

A verifier may hang, crash or be killed for memory; only the sample it was looking at is lost, with status
``timeout`` or ``error``. The limit is the parent's clock and SIGKILL: no signal handler, so it holds in any
thread and in C code. Workers are fresh interpreters (the parent may hold torch threads, which a fork would
break) that import neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import importlib
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
from megatron_dapo.rewards.registry import (
    RewardResult,
    judge,
    module_of,
    prepare_reward,
    reward_by_name,
    reward_for,
)
from megatron_dapo.types import Group, InputError, Sums

PREPARE_LIMIT_S = 120.0
"""Seconds a worker may take to start and to import what a reward needs."""
LARGEST_CHUNK = 64
"""Samples sent to a worker at once, at most; a chunk shrinks while it takes longer than CHUNK_S."""
CHUNK_S = 0.1
MOST_FALSE_STARTS = 3
"""Workers in a row that may die before their first sample; then starting another would not help."""
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from megatron_dapo.rewards.pool import work; work(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class _Task:
    reward: str
    module: str  # to import first: it registers or holds the reward
    response: str
    answer: str
    extra: dict[str, Any]


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Connection[Any, Any]
    tasks: deque[int] = field(default_factory=deque)  # places in the batch, in the order they are worked on
    chunk: int = 4
    proven: bool = False  # it got as far as a sample, ever
    begun: float | None = None  # when it started on its chunk; None while it prepares
    deadline: float = math.inf


class RewardPool:
    """Scores groups in ``options.reward_num_workers`` processes; use it as a context manager.

    Workers start with the first batch and are reused until ``close``; they end by themselves when the parent
    is gone. With 0 workers rewards run in this process, one after the other, without any limit.

    Example::

        with RewardPool(options.reward) as pool:
            sums = pool.score(groups)
    """

    def __init__(self, options: RewardOptions) -> None:
        if options.reward_num_workers < 0:
            raise InputError(f"--reward-num-workers {options.reward_num_workers}: must be 0 or more")
        if not options.reward_timeout_s > 0:
            raise InputError(f"--reward-timeout-s {options.reward_timeout_s}: must be above 0")
        if options.reward != "auto":
            reward_by_name(options.reward)
        self._options = options
        self._workers: list[_Worker] = []
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
        Raises: ``InputError`` for an unknown reward or a row that its reward cannot use.
        """
        started = time.monotonic()
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            return {}
        tasks = self._tasks(groups)
        with self._lock:
            results = self._in_workers(tasks) if self._options.reward_num_workers else self._here(tasks)
        for sample, result in zip(samples, results, strict=True):
            sample.score, sample.acc = result.score, result.acc
            sample.prediction, sample.status = result.prediction, result.status
        sums: Sums = {}
        for status in ("no_answer", "timeout", "error"):
            count = sum(sample.status == status for sample in samples)
            sums[f"reward/{status}"] = (float(count), float(len(samples)))
        sums["reward/seconds"] = (time.monotonic() - started, 1.0)
        return sums

    def _tasks(self, groups: list[Group]) -> list[_Task]:
        tasks = []
        for group in groups:
            prompt = group.prompt
            name = reward_for(prompt, self._options)
            module = module_of(name)
            if module == "__main__" and self._options.reward_num_workers:
                raise InputError(f"--reward {name}: workers cannot import the main script; put it in a module")
            tasks += [_Task(name, module, s.text, prompt.answer, prompt.extra) for s in group.samples]
        return tasks

    def _here(self, tasks: list[_Task]) -> list[RewardResult]:
        for name in {task.reward for task in tasks}:
            prepare_reward(name)
        return [judge(t.reward, t.response, t.answer, t.extra, self._options) for t in tasks]

    def _in_workers(self, tasks: list[_Task]) -> list[RewardResult]:
        pending = deque(range(len(tasks)))
        results: dict[int, RewardResult] = {}
        try:
            while len(results) < len(tasks):
                self._dispatch(tasks, pending)
                busy = [worker for worker in self._workers if worker.tasks]
                patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                ready = wait([worker.channel for worker in busy], patience)
                now = time.monotonic()
                for worker in busy:
                    if worker.channel in ready:
                        self._receive(worker, pending, results)
                    elif worker.deadline <= now:
                        self._replace(worker, pending, results)
        except BaseException:
            self.close()  # what the workers still hold belongs to a batch nobody waits for
            raise
        return [results[place] for place in range(len(tasks))]

    def _dispatch(self, tasks: list[_Task], pending: deque[int]) -> None:
        """Give every idle worker a chunk; start workers that are missing."""
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
                worker.channel.send([tasks[place] for place in chunk])

    def _receive(self, worker: _Worker, pending: deque[int], results: dict[int, RewardResult]) -> None:
        """Take what a worker has sent: None (it begins), a result a sample, or an InputError's text."""
        try:
            while worker.tasks and worker.channel.poll():
                message = worker.channel.recv()
                now = time.monotonic()
                worker.deadline = now + self._options.reward_timeout_s
                if message is None:
                    worker.begun, worker.proven = now, True
                elif isinstance(message, str):
                    raise InputError(message)
                else:
                    place = worker.tasks.popleft()
                    assert place not in results, "a sample was scored twice"
                    results[place] = message
        except (EOFError, OSError):
            self._replace(worker, pending, results)
            return
        if not worker.tasks and worker.begun is not None:
            self._false_starts = 0
            slow = time.monotonic() - worker.begun > CHUNK_S
            worker.chunk = max(1, worker.chunk // 2) if slow else min(LARGEST_CHUNK, worker.chunk * 2)

    def _replace(self, worker: _Worker, pending: deque[int], results: dict[int, RewardResult]) -> None:
        """Bury a dead or overdue worker: its current sample takes the blame, the others go back in line."""
        overdue = worker.deadline <= time.monotonic()
        code = _kill(worker)
        self._workers.remove(worker)
        if worker.begun is None:
            self._false_starts += not worker.proven
            if self._false_starts > MOST_FALSE_STARTS:
                raise RuntimeError(f"reward workers die before their first sample (exit status {code}); see stderr")
        else:
            late = code == -signal.SIGALRM or (overdue and code == -signal.SIGKILL)
            results[worker.tasks.popleft()] = RewardResult.unscored("timeout" if late else "error")
        pending.extendleft(reversed(worker.tasks))
        worker.tasks.clear()


def _start(options: RewardOptions) -> _Worker:
    ours, theirs = Pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=environment,
        start_new_session=True,  # Ctrl-C is the parent's business, and a verifier's children die with it
    )
    theirs.close()
    with contextlib.suppress(OSError):  # it died already: the first read says so
        ours.send(options)
    return _Worker(process, ours)


def _kill(worker: _Worker) -> int:
    """Kill a worker and the processes it started; its exit status (negative: the signal that ended it)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.channel.close()
    return worker.process.wait()


# --- the worker's side --------------------------------------------------------------------------------------


def work(descriptor: int) -> None:
    """Main function of a worker: chunks in, one result a sample out, until the other end is closed."""
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what verifiers print is not lost among the parent's output
    channel: Connection[Any, Any] = Connection(descriptor)
    parent = os.getppid()
    ready: set[str] = set()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone or has closed the pool
        options: RewardOptions = channel.recv()
        while True:
            while not channel.poll(2.0):
                if os.getppid() != parent:
                    return
            try:
                _work_on(channel.recv(), options, ready, channel.send)
            except InputError as error:
                channel.send(str(error))


def _work_on(tasks: list[_Task], options: RewardOptions, ready: set[str], send: Callable[[object], None]) -> None:
    for task in tasks:
        if task.reward not in ready:
            importlib.import_module(task.module)
            prepare_reward(task.reward)
            ready.add(task.reward)
    send(None)
    for task in tasks:
        # Where the parent has died, nobody kills a verifier that hangs: the default action of SIGALRM does.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, options.reward_timeout_s + 1.0)
        result = judge(task.reward, task.response, task.answer, task.extra, options)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        send(result)
