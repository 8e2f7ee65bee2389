"""Skipped optimizer steps: counted over rollout steps, said at once, too many in a row stop the run."""

from __future__ import annotations

import pytest

from megatron_dapo.training.skips import ADVICE, REASONS, Skip, SkippedUpdates
from megatron_dapo.types import InputError


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_so_many_in_a_row_stop_the_run_and_every_one_is_said(limit: int, reason: Skip) -> None:
    skips, step = SkippedUpdates(limit), 0
    for step in range(1, limit):
        said = skips.count(reason, step)
        assert said is not None and f"rollout step {step} " in said and REASONS[reason] in said
        assert f"{step} in a row" in said and f"stops after {limit} (--max-skipped-updates)" in said
    with pytest.raises(InputError) as stopped:
        skips.count(reason, step + 1)
    message = str(stopped.value)
    assert f"rollout step {step + 1}: {limit} updates in a row" in message and "\n" not in message
    assert REASONS[reason] in message and ADVICE[reason] in message and f"--max-skipped-updates is {limit}" in message


def test_an_update_that_is_taken_begins_the_count_anew() -> None:
    skips = SkippedUpdates(3)
    for step in range(10):
        assert skips.count("nonfinite", step) and skips.count("no_tokens", step)
        assert skips.count(None, step) is None
    assert skips.taken == 10 and skips.end(10) is None


def test_reasons_that_alternate_are_all_named() -> None:
    skips = SkippedUpdates(3)
    skips.count("nonfinite", 1)
    skips.count("no_groups", 2)
    with pytest.raises(InputError, match="1 x the gradient is not finite, 2 x no group has a signal"):
        skips.count("no_groups", 3)


@pytest.mark.parametrize("reason", REASONS)
def test_zero_never_stops_but_says_so_once_and_at_the_end(reason: Skip) -> None:
    skips = SkippedUpdates(0)
    said = [skips.count(reason, step) for step in range(1, 9)]
    assert said[0] and said[1:] == [None] * 7
    if reason == "nonfinite":
        with pytest.raises(InputError, match="not one update was taken up to rollout step 8"):
            skips.end(8)
    else:
        assert "not one update was taken up to rollout step 8" in (skips.end(8) or "")


def test_a_run_without_updates_to_take_ends_quietly() -> None:
    assert SkippedUpdates(3).end(0) is None
