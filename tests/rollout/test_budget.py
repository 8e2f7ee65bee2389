"""Sizes of waves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import Options
from megatron_dapo.rollout.budget import FixedBudget, YieldAdaptiveBudget, make_budget
from megatron_dapo.types import InputError


def adaptive(rate: float | None = None, wave_size: int = 1536, margin: float = 0.1) -> YieldAdaptiveBudget:
    budget = YieldAdaptiveBudget(wave_size, margin, ema=0.7)
    budget.load_state_dict({"rate": rate})
    return budget


def test_a_fixed_wave_never_changes():
    budget = FixedBudget(1536)
    budget.observe(1500, 1536)
    assert [budget.next_wave(missing) for missing in (512, 1)] == [1536, 1536]


def test_the_first_wave_is_full():
    assert adaptive().next_wave(512) == 1536


@pytest.mark.parametrize(
    ("missing", "rate", "size"),
    [
        (512, 0.5, 1127),  # 512 / .5 * 1.1 = 1126.4
        (512, 1.0, 564),  # the model is at its best: little more than the step
        (512, 0.1, 1536),  # 5632 wanted, capped at a full wave
        (10, 1.0, 11),
        (100, 1.0, 110),  # exactly, not 111 by rounding
        (1, 1.0, 2),  # one group missing is a small request (slime#2217)
        (1, 0.25, 5),
    ],
)
def test_the_next_wave_is_what_is_missing_over_the_keep_rate(missing, rate, size):
    assert adaptive(rate).next_wave(missing) == size


def test_without_a_margin_one_missing_group_is_one_prompt():
    assert adaptive(1.0, margin=0.0).next_wave(1) == 1


def test_nothing_ever_kept_asks_for_a_full_wave():
    budget = adaptive()
    budget.observe(0, 1536)
    assert budget.next_wave(512) == 1536


@given(st.integers(1, 4000), st.floats(0, 1), st.integers(1, 2000), st.floats(0, 3))
def test_a_wave_is_never_empty_and_never_above_the_cap(missing, rate, wave_size, margin):
    size = adaptive(rate, wave_size, margin).next_wave(missing)
    assert 1 <= size <= wave_size
    assert size >= min(missing, wave_size), "fewer prompts than groups wanted could never be enough"


def test_the_rate_is_a_moving_average_of_full_waves():
    budget = adaptive()
    budget.observe(768, 1536)
    assert budget.rate == 0.5
    budget.observe(1536, 1536)
    assert budget.rate == pytest.approx(0.7 * 0.5 + 0.3 * 1.0)


def test_a_small_refill_weighs_as_little_as_it_says():
    budget = adaptive(0.5)
    budget.observe(0, 2)
    assert budget.rate == pytest.approx(0.5 * 0.7 ** (2 / 1536))
    halves, whole = adaptive(0.5), adaptive(0.5)
    halves.observe(768, 768)
    halves.observe(768, 768)
    whole.observe(1536, 1536)
    assert halves.rate == pytest.approx(whole.rate), "the cut into waves does not matter"


def test_it_finds_the_rate_of_a_policy_that_changes():
    budget = adaptive(0.9)
    for _ in range(30):
        budget.observe(budget.next_wave(512) // 4, budget.next_wave(512))
    assert budget.rate == pytest.approx(0.25, abs=0.01)


def test_state_round_trip():
    budget, other = adaptive(), adaptive()
    budget.observe(3, 7)
    other.load_state_dict(budget.state_dict())
    assert other.rate == budget.rate and other.next_wave(5) == budget.next_wave(5)


def test_options_choose():
    assert isinstance(make_budget(Options.from_args()), FixedBudget)
    chosen = make_budget(Options.from_args(sampling_budget="yield_adaptive", rollout_batch_size=8))
    assert isinstance(chosen, YieldAdaptiveBudget) and chosen.next_wave(8) == 24


@pytest.mark.parametrize(
    ("overrides", "flag"),
    [({"budget_margin": -0.5}, "--budget-margin -0.5"), ({"budget_ema": 1.0}, "--budget-ema 1.0")],
)
def test_numbers_that_make_no_sense(overrides, flag):
    with pytest.raises(InputError, match=flag):
        make_budget(Options.from_args(sampling_budget="yield_adaptive", **overrides))
