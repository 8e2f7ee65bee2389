"""Generation beside training: order, the bound on staleness, states for a resume, errors, holding still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from megatron_dapo.rollout.ahead import Ahead
from megatron_dapo.types import InputError

HANGS_S = 120.0
"""What has not happened by then never will."""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


class Side:
    """Collects by counting; the state is the number of steps collected."""

    def __init__(self) -> None:
        self.version, self.collected = -1, 0
        self.at: dict[int, int] = {}
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def collect(self, step: int) -> str:
        assert step == self.collected
        self.at[step] = self.version
        self.begun.set()
        self.may_end.wait()
        self.collected += 1
        return f"rows {step}"

    def state(self) -> dict[str, int]:
        return {"collected": self.collected}


@pytest.mark.parametrize("lead", [1, 3])
def test_no_step_begins_with_weights_older_than_the_lead_allows(lead):
    """And that far it does get, before the weights of the step are out."""
    side = Side()
    ahead = Ahead(side.collect, side.state, first=0, last=12, lead=lead)
    for step in range(12):
        side.version = step
        ahead.publish(step)
        until(lambda step=step: side.collected == min(12, step + lead + 1))
        assert ahead.take(step) == f"rows {step}"
        assert ahead.state_dict(step + 1) == {"collected": step + 1}
    assert side.at == {step: max(0, step - lead) for step in range(12)}
    ahead.close()


def test_nothing_begins_before_the_first_publication():
    side = Side()
    ahead = Ahead(side.collect, side.state, first=0, last=3, lead=2)
    assert not side.begun.wait(0.05)
    side.version = 0
    ahead.publish(0)
    assert ahead.take(0) == "rows 0" and side.at[0] == 0
    ahead.close()


def test_idle_waits_for_the_step_under_way_and_holds_the_next():
    side = Side()
    side.may_end.clear()
    ahead = Ahead(side.collect, side.state, first=0, last=5, lead=4)
    ahead.publish(0)
    assert side.begun.wait(HANGS_S)
    threading.Timer(0.05, side.may_end.set).start()
    with ahead.idle():
        assert side.collected == 1  # the step under way has ended
        side.begun.clear()
        assert not side.begun.wait(0.05)
    assert [ahead.take(step) for step in range(5)] == [f"rows {step}" for step in range(5)]
    ahead.close()


def test_what_collecting_raised_reaches_the_taker_and_no_earlier_step_is_lost():
    def collect(step: int) -> int:
        if step == 1:
            raise InputError("only 3 of 8 groups")
        return step

    ahead = Ahead(collect, dict, first=0, last=3, lead=2)
    ahead.publish(0)
    assert ahead.take(0) == 0
    with pytest.raises(InputError, match="only 3 of 8"):
        ahead.take(1)
    ahead.close()


def test_a_checkpoint_holds_the_state_before_the_first_step_not_trained():
    side = Side()
    ahead = Ahead(side.collect, side.state, first=0, last=6, lead=3)
    ahead.publish(0)
    ahead.take(0)
    until(lambda: side.collected == 4)
    assert ahead.state_dict(1) == {"collected": 1}
    ahead.close()
    assert not any(t is ahead.thread and t.is_alive() and not t.daemon for t in threading.enumerate())
