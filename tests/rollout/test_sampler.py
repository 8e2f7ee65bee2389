"""Dynamic sampling against an engine that can be forced to be right, wrong, slow and broken."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithm.filtering import has_verdict, verdict_of
from megatron_dapo.config import Options
from megatron_dapo.data.prompts import PromptCursor
from megatron_dapo.rollout.budget import make_budget
from megatron_dapo.rollout.engine import request_seed
from megatron_dapo.rollout.sampler import DynamicSampler
from megatron_dapo.types import Group, InputError, Prompt, Request, Sample, SamplingParams, Sums

Verdicts = Callable[[Group], Sequence[float]]
MIXED, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"row-{i}", "the same text", (5, 6), "7", "test") for i in range(count)]


def sample(acc: float = 0.0, tokens: int = 1, **fields: Any) -> Sample:
    known: dict[str, Any] = {"finish_reason": "stop", "weight_version": 0, "text": "", "status": "ok"}
    ids, logprobs = np.arange(tokens), np.zeros(tokens, np.float32)
    return Sample(ids, logprobs, acc=acc, score=2 * acc - 1, **{**known, **fields})


@dataclass
class Machine:
    """Answers every request with 1 + seed % 5 tokens; remembers what it was asked; ``before`` may raise."""

    weight_version: int = 0
    asked: list[list[Request]] = field(default_factory=list)
    before: Callable[[int], None] = lambda wave: None

    def generate(self, requests, params, on_finish=None):
        self.before(len(self.asked))
        self.asked.append(requests)
        return [sample(0.0, 1 + r.seed % 5, weight_version=self.weight_version) for r in requests]

    def publish(self, version: int) -> None:
        self.weight_version = version

    def close(self) -> None:
        pass


def make(
    verdicts: Verdicts,
    machine: Machine | None = None,
    rows: int = 1000,
    clock: Callable[[], float] = lambda: 0.0,
    seed: int = 7,
    shuffle: bool = False,
    **overrides: Any,
) -> DynamicSampler:
    """A sampler of 4 groups of 2; ``verdicts(group)`` are that group's; ``overrides`` are options."""
    given = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "over_sampling_batch_size": 4, **overrides}
    options = Options.from_args(**given)

    def score(groups: list[Group]) -> Sums:
        for group in groups:
            for one, acc in zip(group.samples, verdicts(group), strict=True):
                one.acc, one.score, one.status = acc, 2 * acc - 1, "ok"
        return {"reward/seconds": (0.5, 1.0)}

    cursor = PromptCursor(prompts(rows), seed, shuffle)
    budget, params = make_budget(options), SamplingParams(8)
    return DynamicSampler(options, seed, cursor, machine or Machine(), score, budget, params, clock)


def orders(groups: list[Group]) -> list[int]:
    return [g.order for g in groups]


def scripted(kinds: Sequence[Sequence[float]]) -> Verdicts:
    """The group with serial number i gets ``kinds[i]``."""
    return lambda group: kinds[group.order]


# --- the filter ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=24, max_size=24), st.integers(1, 5), st.integers(0, 3))
def test_kept_are_exactly_the_first_valid_ones_in_submission_order(mixed, target, oversampling):
    wave = target + oversampling
    waves = 24 // wave
    sampler = make(
        scripted([MIXED if m else WRONG for m in mixed]),
        rollout_batch_size=target,
        over_sampling_batch_size=wave,
        max_num_gen_batches=waves,
    )
    batch = sampler.collect()
    valid = [i for i, m in enumerate(mixed[: waves * wave]) if m]
    assert orders(batch.groups) == valid[:target]
    assert batch.exhausted == (len(valid) < target)
    needed = valid[target - 1] // wave + 1 if len(valid) >= target else waves
    assert batch.report["sampling/waves"] == (needed, 1.0), "not a wave more than it takes"


@pytest.mark.parametrize(
    ("acc", "verdict"),
    [
        ([1, 1, 1, 0], "mixed"),
        ([1, 1, 1, 1], "all_right"),
        ([0, 0, 0, 0], "all_wrong"),
        ([0.5, 0.5, 0.5, 0.5], "level"),  # inside (0, 1), and still without a signal
        ([0.7] * 16, "level"),  # whose float standard deviation need not be 0
        ([0.7, 0.7 + 1e-9], "level"),
        ([0.2, 0.3], "mixed"),
    ],
)
def test_verdict_of_a_group(acc, verdict):
    assert verdict_of(Group(prompts(1)[0], [sample(a) for a in acc], 0)) == verdict


def test_the_filter_reads_accuracy_and_not_the_score():
    """15 x -1 and 1 x -2 after shaping: all are wrong, whatever the rewards' spread (NeMo-RL#2431)."""
    group = Group(prompts(1)[0], [sample(0.0) for _ in range(16)], 0)
    group.samples[3].score = -2.0
    assert np.std([s.score for s in group.samples]) > 0.2
    assert verdict_of(group) == "all_wrong"


def test_a_sample_without_a_verdict_is_not_a_wrong_answer():
    lost = [sample(status="timeout"), sample(status="error"), sample(finish_reason="abort")]
    assert not any(has_verdict(s) for s in lost) and has_verdict(sample(status="no_answer"))
    prompt = prompts(1)[0]
    assert verdict_of(Group(prompt, lost, 0)) == "unscored"
    assert verdict_of(Group(prompt, [sample(1.0), sample(1.0), *lost], 0)) == "all_right"
    assert verdict_of(Group(prompt, [sample(1.0), sample(0.0), *lost], 0)) == "mixed"


def test_unscored_groups_are_dropped_and_counted_apart():
    sampler = make(scripted([MIXED, WRONG, MIXED, RIGHT, *[MIXED] * 4]))
    plain = sampler.score

    def dying(groups: list[Group]) -> Sums:
        sums = plain(groups)
        for group in groups:
            if group.order == 2:
                for one in group.samples:
                    one.status, one.acc = "timeout", 0.0
        return sums

    sampler.score = dying
    batch = sampler.collect()
    assert orders(batch.groups) == [0, 4, 5, 6]
    assert batch.report["sampling/unscored"] == (1, 8)
    assert batch.report["sampling/all_wrong"] == (1, 8)
    assert batch.report["sampling/acc"] == (7, 14), "accuracy is over the samples with a verdict"


def test_nothing_scored_at_all_has_no_accuracy():
    def dead(groups: list[Group]) -> Sums:
        for one in (s for g in groups for s in g.samples):
            one.status = "error"
        return {}

    sampler = make(scripted([]), max_num_gen_batches=1, on_exhausted="keep_zero_signal")
    sampler.score = dead
    batch = sampler.collect()
    assert batch.groups == [] and "sampling/acc" not in batch.report
    assert batch.report["sampling/unscored"] == (4, 4)


@pytest.mark.parametrize("group_size", [1, 2, 8, 16])
def test_group_sizes(group_size):
    """A group of one can never be mixed: it is kept, nothing loops; others are filtered (NeMo-RL#3154)."""
    one_right = lambda group: [float(i == 0 and group.order % 2 == 0) for i in range(group_size)]  # noqa: E731
    batch = make(one_right, n_samples_per_prompt=group_size, on_exhausted="error").collect()
    assert orders(batch.groups) == ([0, 1, 2, 3] if group_size == 1 else [0, 2, 4, 6])
    assert batch.report["sampling/waves"][0] == (1 if group_size == 1 else 2)
    assert batch.report["sampling/keep_rate"] == ((4, 4) if group_size == 1 else (4, 8))
    assert all(len(g.samples) == group_size for g in batch.groups)


@pytest.mark.parametrize(("p", "expected"), [(0.01, 0.149), (0.05, 0.560), (0.1, 0.815), (0.5, 1.0)])
def test_keep_rate_follows_the_probability_of_a_mixed_group(p, expected):
    exact = 1 - p**16 - (1 - p) ** 16
    assert exact == pytest.approx(expected, abs=1e-3)
    draws, count = np.random.default_rng(1), 1500
    sampler = make(
        lambda group: (draws.random(16) < p).astype(float),
        rollout_batch_size=count,
        over_sampling_batch_size=count,
        n_samples_per_prompt=16,
        max_num_gen_batches=1,
    )
    kept, generated = sampler.collect().report["sampling/keep_rate"]
    assert generated == count
    assert abs(kept / count - exact) < 4 * math.sqrt(exact * (1 - exact) / count) + 1e-3


def test_without_dynamic_sampling_one_wave_is_all():
    machine = Machine()
    plain = {"dynamic_sampling": False, "over_sampling_batch_size": None, "on_exhausted": "error"}
    batch = make(lambda g: WRONG, machine, **plain).collect()
    assert orders(batch.groups) == [0, 1, 2, 3] and len(machine.asked) == 1 and not batch.exhausted
    assert batch.report["sampling/all_wrong"] == (4, 4)


# --- waves, limits and what follows them ---------------------------------------------------------------


def test_adaptive_waves_ask_for_what_is_missing():
    machine = Machine()
    half = lambda group: MIXED if group.order % 2 else RIGHT  # noqa: E731
    given = {"rollout_batch_size": 10, "over_sampling_batch_size": 16, "sampling_budget": "yield_adaptive"}
    sampler = make(half, machine, **given)
    sampler.collect()
    assert [len(wave) // 2 for wave in machine.asked] == [16, 5], "8 kept of 16; 2 missing / .5 * 1.1 = 4.4"


def test_bounded_by_waves():
    machine = Machine()
    batch = make(lambda g: RIGHT, machine, max_num_gen_batches=3).collect()
    assert len(machine.asked) == 3 and batch.groups == [] and batch.exhausted and batch.accepted == 0


def test_bounded_by_seconds():
    """Each wave takes 40 s of a clock that only the engine moves."""
    now = [0.0]
    machine = Machine(before=lambda wave: now.__setitem__(0, now[0] + 40))
    limits = {"max_gen_seconds": 100, "max_num_gen_batches": 50}
    batch = make(lambda g: WRONG, machine, clock=lambda: now[0], **limits).collect()
    assert len(machine.asked) == 3 and batch.exhausted


def test_a_step_always_gets_one_wave():
    assert len(make(lambda g: MIXED, max_gen_seconds=0.0).collect().groups) == 4


SHORT = [MIXED, WRONG, RIGHT, MIXED, WRONG, WRONG, WRONG, RIGHT]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("train_partial", [0, 3]), ("keep_zero_signal", [0, 3, 1, 2]), ("repeat", [0, 3, 0, 3])],
)
def test_what_happens_when_groups_are_missing(policy, kept):
    batch = make(scripted(SHORT), max_num_gen_batches=2, on_exhausted=policy).collect()
    assert orders(batch.groups) == kept
    assert (batch.accepted, batch.target, batch.exhausted) == (2, 4, True)
    assert batch.report["sampling/generated_groups"] == (8, 1)
    assert batch.report["sampling/keep_rate"] == (2, 8), "filling up does not change what was seen"


def test_repeat_is_round_robin():
    verdicts = scripted([MIXED, MIXED, MIXED, WRONG])
    batch = make(verdicts, max_num_gen_batches=1, on_exhausted="repeat").collect()
    assert orders(batch.groups) == [0, 1, 2, 0]


def test_nothing_to_repeat():
    batch = make(lambda g: WRONG, max_num_gen_batches=1, on_exhausted="repeat").collect()
    assert batch.groups == []


def test_the_error_says_what_to_change():
    sampler = make(scripted(SHORT), max_num_gen_batches=2, on_exhausted="error")
    with pytest.raises(InputError) as raised:
        sampler.collect()
    line = str(raised.value)
    for word in ("2 of 4", "25.0%", "--max-num-gen-batches 2", "--max-gen-seconds 7200", "--on-exhausted"):
        assert word in line
    assert "\n" not in line


# --- surplus -------------------------------------------------------------------------------------------


def test_surplus_is_dropped_and_counted():
    sampler = make(lambda g: MIXED, over_sampling_batch_size=10)
    first, second = sampler.collect(), sampler.collect()
    assert orders(first.groups) == [0, 1, 2, 3] and orders(second.groups) == [10, 11, 12, 13]
    assert first.report["sampling/discarded_groups"] == (6, 1)
    assert first.report["sampling/keep_rate"] == (10, 10)


def test_surplus_is_kept_for_the_next_steps_ahead_of_new_groups():
    machine = Machine()
    sampler = make(lambda g: MIXED, machine, over_sampling_batch_size=10, surplus="keep")
    batches = []
    for version in range(3):
        machine.publish(version)
        batches.append(sampler.collect())
    assert [orders(b.groups) for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    versions = [[g.samples[0].weight_version for g in b.groups] for b in batches]
    assert versions == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 2]], "samples say which weights drew them"
    assert [b.report["sampling/waves"][0] for b in batches] == [1, 0, 1]
    assert [b.report["sampling/discarded_groups"] for b in batches] == [(0, 1)] * 3


# --- identity, seeds, state ----------------------------------------------------------------------------


def test_the_same_prompt_may_come_twice_in_a_step():
    machine = Machine()
    batch = make(lambda g: MIXED, machine, rows=2).collect()
    assert [g.prompt.uid for g in batch.groups] == ["row-0", "row-1", "row-0", "row-1"]
    assert orders(batch.groups) == [0, 1, 2, 3]
    assert len({r.seed for r in machine.asked[0]}) == 8


def test_seeds_depend_on_nothing_but_run_group_and_sample():
    assert request_seed(1234, 56, 7) == 8337093171563415984, "a change would unhinge every run that resumes"
    seeds = {request_seed(s, o, i) for s in (0, 1, 2**32) for o in range(40) for i in range(16)}
    assert len(seeds) == 3 * 40 * 16 and all(0 <= seed < 2**63 for seed in seeds)
    drawn = []
    for wave in (4, 6, 12):
        machine = Machine()
        given = {"over_sampling_batch_size": wave, "max_num_gen_batches": 12 // wave}
        make(lambda g: WRONG, machine, **given).collect()
        drawn.append([(r.prompt.uid, r.seed) for asked in machine.asked for r in asked])
    assert drawn[0] == drawn[1] == drawn[2]


def third(group: Group) -> Sequence[float]:
    return MIXED if group.order % 3 == 0 else WRONG


def fifth(group: Group) -> Sequence[float]:
    return MIXED if group.order % 5 == 0 else WRONG


STATEFUL: dict[str, Any] = {
    "surplus": "keep",
    "sampling_budget": "yield_adaptive",
    "over_sampling_batch_size": 9,
    "rows": 50,
    "shuffle": True,
}


def requests_of(machine: Machine) -> list[list[tuple[str, int]]]:
    return [[(r.prompt.uid, r.seed) for r in wave] for wave in machine.asked]


@pytest.mark.parametrize("killed_after", [1, 2, 4])
def test_a_resumed_run_makes_the_requests_of_the_continuous_one(killed_after):
    whole, before, after = Machine(), Machine(), Machine()
    continuous = make(third, whole, **STATEFUL)
    kept = [orders(continuous.collect().groups) for _ in range(6)]
    killed = make(third, before, **STATEFUL)
    for _ in range(killed_after):
        killed.collect()
    state = pickle.loads(pickle.dumps(killed.state_dict()))
    killed.collect()  # what it still did is lost with the process
    resumed = make(third, after, **STATEFUL)
    resumed.load_state_dict(state)
    assert [orders(resumed.collect().groups) for _ in range(6 - killed_after)] == kept[killed_after:]
    assert requests_of(after) == requests_of(whole)[-len(after.asked) :]
    assert resumed.state_dict()["budget"] == continuous.state_dict()["budget"]
    assert resumed.totals == continuous.totals


def test_the_surplus_survives_a_resume_with_its_samples():
    sampler = make(lambda g: MIXED, over_sampling_batch_size=10, surplus="keep")
    sampler.collect()
    resumed = make(lambda g: MIXED, over_sampling_batch_size=10, surplus="keep")
    resumed.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
    for ours, theirs in zip(resumed.collect().groups, sampler.collect().groups, strict=True):
        assert (ours.order, ours.prompt) == (theirs.order, theirs.prompt)
        for a, b in zip(ours.samples, theirs.samples, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids) and (a.acc, a.status) == (b.acc, b.status)


def test_a_surplus_of_another_group_size_is_left_out_and_said(capsys):
    sampler = make(lambda g: MIXED, over_sampling_batch_size=10, surplus="keep")
    sampler.collect()
    resumed = make(lambda g: MIXED * 2, n_samples_per_prompt=4, surplus="keep")
    resumed.load_state_dict(sampler.state_dict())
    assert "6 groups kept for this step are left out: --n-samples-per-prompt is 4 now" in capsys.readouterr().out
    assert all(len(group.samples) == 4 for group in resumed.collect().groups)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_loses_no_prompt(error):
    """The engine dies in the second wave of the second step; then that step starts over."""
    whole = Machine()
    continuous = make(fifth, whole, **STATEFUL)
    for _ in range(3):
        continuous.collect()

    def dying(wave: int) -> None:
        if wave == second_step + 1:
            raise error("gone")

    machine = Machine()
    sampler = make(fifth, machine, **STATEFUL)
    sampler.collect()
    second_step, state = len(machine.asked), pickle.dumps(sampler.state_dict())
    machine.before = dying
    with pytest.raises(error):
        sampler.collect()
    assert len(machine.asked) == second_step + 1, "the first wave of the step had been generated"
    assert pickle.dumps(sampler.state_dict()) == state
    machine.asked, machine.before = machine.asked[:second_step], lambda wave: None
    sampler.collect()
    sampler.collect()
    assert requests_of(machine) == requests_of(whole)


def test_state_taken_in_the_middle_of_a_step_is_that_of_its_beginning():
    seen: list[bytes] = []
    machine = Machine(before=lambda wave: seen.append(pickle.dumps(sampler.state_dict())))
    sampler = make(third, machine, **STATEFUL)
    start = pickle.dumps(sampler.state_dict())
    sampler.collect()
    assert len(seen) > 1 and set(seen) == {start}
    assert pickle.dumps(sampler.state_dict()) != start


def test_an_error_of_the_verifier_undoes_the_step_too():
    machine = Machine()
    sampler = make(scripted([MIXED] * 3), machine)
    with pytest.raises(IndexError):
        sampler.collect()
    assert sampler.next_order == 0 and sampler.prompts.take(1)[0].uid == "row-0"


# --- what it says --------------------------------------------------------------------------------------


def test_statistics_cover_everything_generated():
    machine = Machine()
    sampler = make(scripted([MIXED, WRONG, RIGHT, MIXED, MIXED, RIGHT, MIXED, MIXED]), machine)
    batch = sampler.collect()
    lengths = [1 + r.seed % 5 for wave in machine.asked for r in wave]
    kept = [lengths[2 * order + i] for order in (0, 3, 4, 6) for i in range(2)]
    assert batch.report == {
        "sampling/waves": (2, 1),
        "sampling/generated_groups": (8, 1),
        "sampling/discarded_groups": (1, 1),
        "sampling/generated_tokens": (sum(lengths), 1),
        "sampling/kept_tokens": (sum(kept), 1),
        "sampling/acc": (9, 16),
        "sampling/keep_rate": (5, 8),
        "sampling/all_right": (2, 8),
        "sampling/all_wrong": (1, 8),
        "sampling/unscored": (0, 8),
        "sampling/response_length": (sum(lengths), 16),
        "reward/seconds": (1.0, 2),
    }
    assert sampler.totals == batch.report


def test_progress_hears_of_every_wave():
    heard: list[tuple[int, int, int]] = []
    sampler = make(scripted([MIXED, WRONG, RIGHT, MIXED, *[MIXED] * 4]))
    sampler.collect(lambda *now: heard.append(now))
    assert heard == [(0, 4, 0), (2, 4, 1), (4, 4, 2)]


def test_the_totals_are_those_of_all_steps():
    sampler = make(lambda group: MIXED)
    reports = [sampler.collect().report for _ in range(3)]
    assert sampler.totals["sampling/generated_groups"] == (12.0, 3.0)
    assert sampler.totals["sampling/keep_rate"] == (12.0, 12.0)
    tokens = sum(report["sampling/generated_tokens"][0] for report in reports)
    assert sampler.totals["sampling/generated_tokens"] == (tokens, 3.0)
