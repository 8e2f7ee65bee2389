"""Rewards that misbehave, for the tests of the pool; workers import this module by name."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import RewardResult, register_reward
from megatron_dapo.types import InputError


def scripted(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Does what the first word of the response says; otherwise right if the response equals the answer."""
    order, _, rest = response.partition(" ")
    if order == "sleep":
        time.sleep(float(rest))
    elif order == "spin":
        while True:
            pass
    elif order == "exit":
        os._exit(int(rest))
    elif order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif order == "stop_signal":
        os.kill(os.getpid(), signal.SIGUSR1)
    elif order == "raise":
        raise ZeroDivisionError("verifier bug")
    elif order == "input_error":
        raise InputError("the row is bad; mend it")
    elif order == "quit":
        raise SystemExit(3)
    elif order == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.1)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    elif order == "hang_with_child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(rest, "w") as file:
            file.write(str(child.pid))
        child.wait()
    elif order == "print":
        print("noise on standard output", flush=True)
    elif order == "log":
        with open(extra["path"], "a") as file:
            file.write(f"{rest}\n")
    return RewardResult.of(response == answer, response)


def describe_process(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Right where this process has imported none of the heavy packages; the prediction is its id."""
    heavy = {"torch", "megatron", "transformers", "reasoning_gym"} & sys.modules.keys()
    return RewardResult.of(not heavy, f"{os.getpid()} {os.getppid()} {' '.join(sorted(heavy))}")


def not_a_verdict(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> Any:
    """Returns the bare number that users of other systems return."""
    return 1.0


def not_finite(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """A score that would poison the group's advantage."""
    return RewardResult(float("nan"), 1.0, "", "ok")


@register_reward("test_same_length")
def same_length(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Registered by decorator, as a user's module would."""
    return RewardResult.of(len(response) == len(answer), response)


def forks(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Forks where the response says so; what the child then does is the second word. The verdict names its response."""
    how, _, rest = response.partition(" ")
    what = rest.partition(" ")[0]
    forked = {"fork": os.fork, "cfork": ctypes.CDLL(None).fork}.get(how)
    if forked is not None and forked() == 0:
        if what == "raises":
            raise ZeroDivisionError("in the child")
        if what == "exits":
            sys.exit(0)
        if what == "refuses":
            raise InputError("a child has nothing to refuse")
        if what == "garbage":
            _write_everywhere(b"garbage\n\x00\xff" * 10)
        if what == "lingers":
            time.sleep(0.3)
        if what == "session":
            os.setsid()
            time.sleep(0.3)
        if what == "shouts":
            _write_everywhere(b'{"kind": "verdict", "serial": 0}\n')
    if what == "dies":
        os._exit(9)  # parent and child alike
    return RewardResult.of(response == answer, response)


def _write_everywhere(data: bytes) -> None:
    """To every open file beyond the standard ones."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


def scribbles(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> RewardResult:
    """Writes to the pool's own pipe, in the worker itself."""
    if response.startswith("scribble"):
        _write_everywhere(extra["bytes"])
    return RewardResult.of(response == answer, response)


def returns(response: str, answer: str, extra: dict[str, Any], options: RewardOptions) -> Any:
    """Returns the thing of this name, which is no verdict; anything else is judged."""
    things: dict[str, Any] = {
        "nan": RewardResult(math.nan, 1.0, "", "ok"),
        "inf": RewardResult(math.inf, 1.0, "", "ok"),
        "minus inf": RewardResult(-math.inf, 0.0, "", "ok"),
        "acc nan": RewardResult(1.0, math.nan, "", "ok"),
        "acc 2": RewardResult(1.0, 2.0, "", "ok"),
        "huge": RewardResult(1e200, 1.0, "", "ok"),
        "big int": RewardResult(10**400, 1.0, "", "ok"),
        "float": 1.0,
        "True": True,
        "string": "1",
        "None": None,
        "dict": {"score": 1.0, "acc": 1.0},
        "tuple": (1.0, 1.0, "", "ok"),
        "score text": RewardResult("1", 1.0, "", "ok"),  # type: ignore[arg-type]
        "score None": RewardResult(None, 1.0, "", "ok"),  # type: ignore[arg-type]
        "score complex": RewardResult(1j, 1.0, "", "ok"),  # type: ignore[arg-type]
        "score array": RewardResult(np.ones(2), 1.0, "", "ok"),  # type: ignore[arg-type]
        "prediction": RewardResult(1.0, 1.0, 5, "ok"),  # type: ignore[arg-type]
        "status": RewardResult(1.0, 1.0, "", "fine"),  # type: ignore[arg-type]
        "status array": RewardResult(1.0, 1.0, "", np.ones(2)),  # type: ignore[arg-type]
        "empty": RewardResult.__new__(RewardResult),
    }
    if response in NOT_VERDICTS:
        return things[response]
    numbers = {"numpy": np.float32(1.0), "bool": True, "int": 1}
    if response in numbers:
        return RewardResult(numbers[response], numbers[response], response, "ok")
    return RewardResult.of(response == answer, response)


NOT_VERDICTS = (
    "nan", "inf", "minus inf", "acc nan", "acc 2", "huge", "big int", "float", "True", "string", "None", "dict", "tuple",
    "score text", "score None", "score complex", "score array", "prediction", "status", "status array", "empty",
)  # fmt: skip
