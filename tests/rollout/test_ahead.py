"""Generation beside training: order, the bound on staleness, states for a resume, errors, holding still."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_dapo.rollout.ahead import Ahead
from megatron_dapo.types import InputError


class Side:
    """Collects by counting; the state is the number of steps collected."""

    def __init__(self) -> None:
        self.version, self.collected = 0, 0
        self.at: dict[int, int] = {}

    def collect(self, step: int) -> str:
        assert step == self.collected
        self.at[step] = self.version
        time.sleep(0.01)
        self.collected += 1
        return f"rows {step}"

    def state(self) -> dict[str, int]:
        return {"collected": self.collected}


@pytest.mark.parametrize("lead", [1, 3])
def test_no_step_begins_with_weights_older_than_the_lead_allows(lead):
    side = Side()
    ahead = Ahead(side.collect, side.state, first=0, last=12, lead=lead)
    for step in range(12):
        side.version = step
        ahead.publish(step)
        assert ahead.take(step) == f"rows {step}"
        assert ahead.state_dict(step + 1) == {"collected": step + 1}
        time.sleep(0.02)
    assert all(step - lead <= version <= step for step, version in side.at.items())
    assert any(step - version == lead for step, version in side.at.items())
    ahead.close()


def test_nothing_begins_before_the_first_publication():
    side = Side()
    ahead = Ahead(side.collect, side.state, first=0, last=3, lead=2)
    time.sleep(0.05)
    assert side.collected == 0
    ahead.publish(0)
    assert ahead.take(0) == "rows 0"
    ahead.close()


def test_idle_waits_for_the_step_under_way_and_holds_the_next():
    side = Side()
    ahead = Ahead(side.collect, side.state, first=0, last=5, lead=4)
    ahead.publish(0)
    time.sleep(0.005)
    with ahead.idle():
        before = side.collected
        time.sleep(0.05)
        assert side.collected == before
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
    while side.collected < 4:
        time.sleep(0.005)
    assert ahead.state_dict(1) == {"collected": 1}
    ahead.close()
    assert not any(t is ahead.thread and t.is_alive() and not t.daemon for t in threading.enumerate())
