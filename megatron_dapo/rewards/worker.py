"""The worker's side of the pool: chunks of tasks in, one line of JSON out for every reply.

A reward is somebody else's code. It may fork and let both processes return, leave a child behind, or print. So a reply
carries the serial number of its task, only the worker itself replies, and a child that a reward forks does not inherit
the channel.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards.registry import NotAVerdict, RewardResult, judge, prepare_reward
from megatron_dapo.types import InputError


@dataclass(frozen=True)
class Task:
    """One response to judge; ``serial`` is its number in the life of the pool."""

    serial: int
    reward: str
    module: str  # to import first: it registers or holds the reward
    response: str
    answer: str
    extra: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a worker says: it begins with a chunk; the verdict on a task; or the ``InputError`` that ends the run.

    ``malformed``: the reward returned something that is no verdict; ``fault`` says what.
    """

    kind: Literal["begin", "verdict", "refusal"]
    serial: int
    score: float = 0.0
    acc: float = 0.0
    prediction: str = ""
    status: str = "ok"
    fault: str = ""
    malformed: bool = False

    def line(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Reply | None:
        """What travelled; None where it is no reply."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return None
        whole = isinstance(fields, dict) and fields.keys() == cls.__dataclass_fields__.keys()
        return cls(**fields) if whole else None

    @property
    def result(self) -> RewardResult:
        """The verdict."""
        return RewardResult(self.score, self.acc, self.prediction, self.status, self.fault)  # type: ignore[arg-type]


def judge_task(task: Task, options: RewardOptions) -> Reply:
    """The verdict on a task; what is no verdict becomes status ``error``, and says so. Raises: ``InputError``, the reward's."""
    malformed = False
    try:
        with only_this_process():
            result = judge(task.reward, task.response, task.answer, task.extra, options)
    except NotAVerdict as error:
        result, malformed = RewardResult.unscored("error", fault=str(error)), True
    return Reply("verdict", task.serial, **asdict(result), malformed=malformed)


@contextlib.contextmanager
def only_this_process() -> Iterator[None]:
    """A child that is forked inside ends where it would leave: only the process that came in goes on."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != owner:
            os._exit(0)


def work(tasks_fd: int, replies_fd: int) -> None:
    """Main function of a worker: until the other end is closed or the parent is gone; children of rewards end with it."""
    for descriptor in (tasks_fd, replies_fd):
        os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what verifiers print is not lost among the parent's output
    channel: Connection[Any, Any] = Connection(tasks_fd, writable=False)

    def leave_to_the_parent() -> None:
        channel.close()
        os.close(replies_fd)

    os.register_at_fork(after_in_child=leave_to_the_parent)
    # Slurm sends it to every process of a step. A handler, not SIG_IGN, which a verifier's programs would inherit.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    parent, ready = os.getppid(), set[str]()
    with contextlib.suppress(EOFError, OSError):
        options: RewardOptions = channel.recv()
        while os.getppid() == parent:
            if channel.poll(2.0):
                _work_on(channel.recv(), options, ready, lambda reply: _send(replies_fd, reply))
    os.killpg(0, signal.SIGKILL)


def _send(descriptor: int, reply: Reply) -> None:
    left = memoryview(reply.line())
    while left:
        left = left[os.write(descriptor, left) :]


def _work_on(tasks: list[Task], options: RewardOptions, ready: set[str], send: Callable[[Reply], None]) -> None:
    current = tasks[0].serial
    try:
        for task in tasks:
            if task.reward not in ready:
                with only_this_process():
                    importlib.import_module(task.module)
                    prepare_reward(task.reward)
                ready.add(task.reward)
        send(Reply("begin", current))
        for task in tasks:
            current = task.serial
            # Where the parent has died, nobody kills a verifier that hangs: the default action of SIGALRM does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, options.reward_timeout_s + 1.0)
            reply = judge_task(task, options)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            send(reply)
    except InputError as error:
        send(Reply("refusal", current, fault=str(error)))
