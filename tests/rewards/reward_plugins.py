"""Rewards that misbehave, for the tests of the pool; workers import this module by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

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
