"""The loop's and the rollout side's decisions, a method at a time, without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from distributed_helper import run_ranks

from megatron_dapo.config import Options
from megatron_dapo.data.packing import split_minibatches
from megatron_dapo.distributed.collectives import merge_over_ranks
from megatron_dapo.loop import Run, staleness
from megatron_dapo.training.batch import Layout, Minibatch
from megatron_dapo.types import Prompt, Request, Sample, SamplingParams, Sums, Trajectories, merge_sums

SEED = 1234


def rows_of(groups: int, samples: int = 4) -> Trajectories:
    """Groups of equal samples of a prompt token and a response token; the response's id is the sample's number."""
    n = groups * samples
    return Trajectories(
        tokens=[np.array([0, i]) for i in range(n)],
        prompt_lengths=np.ones(n, np.int64),
        rollout_logprobs=[np.zeros(1, np.float32)] * n,
        loss_mask=[np.ones(1, bool)] * n,
        advantages=np.ones(n),
        rewards=np.ones(n),
        acc=np.ones(n),
        group=np.repeat(np.arange(groups), samples),
        weight_version=np.zeros(n, np.int64),
    )


def split(groups: int, step: int = 0, **options: Any) -> list[Minibatch]:
    """The optimizer steps of a rollout, of at most four steps of 16 samples."""
    given = {"num_steps_per_rollout": 4, "rollout_max_prompt_len": 1, "rollout_max_response_len": 1, **options}
    run = SimpleNamespace(
        options=Options.from_args(**given, max_tokens_per_gpu=10_000),
        args=SimpleNamespace(global_batch_size=16, seed=SEED),
        trainer=SimpleNamespace(layout=Layout(1, 0, 1, 0, 1)),
    )
    return Run.split(run, rows_of(groups), step)


def ids(batch: Minibatch) -> list[int]:
    return sorted(int(x) for micro in batch for x in micro.targets)


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        (16, [16, 16, 16, 16]),
        (15, [16, 16, 16, 12]),  # partial: the last one is smaller
        (13, [16, 12, 12, 12]),  # 52 samples need four updates of 16
        (12, [16, 16, 16]),
        (9, [12, 12, 12]),  # 36 samples: two would be larger than asked for
        (5, [12, 8]),
        (4, [16]),
        (1, [4]),
        (20, [20, 20, 20, 20]),  # never more updates than asked for
        (0, []),
    ],
)
def test_a_rollout_has_as_many_updates_as_its_samples_fill(groups, sizes):
    batches = split(groups)
    assert [batch.num_samples for batch in batches] == sizes
    assert sorted(i for batch in batches for i in ids(batch)) == list(range(4 * groups))


def test_a_rollout_that_is_only_generated_has_none():
    assert split(4, rollout_only=True) == []


def test_the_order_of_groups_follows_from_the_seed_and_the_step():
    """Whole groups; another order in every step, the same when the step is done again."""
    orders = [[sorted({i // 4 for i in ids(batch)}) for batch in split(16, step)] for step in (0, 1, 2, 1)]
    for step, order in zip((0, 1, 2, 1), orders, strict=True):
        parts = split_minibatches(np.repeat(np.arange(16), 4), 4, SEED + step)
        assert order == [sorted({int(i) // 4 for i in part}) for part in parts]
    assert orders[0] != orders[1] != orders[2] and orders[1] == orders[3]
    assert orders[0] == [
        [0, 5, 8, 13],
        [9, 12, 14, 15],
        [2, 4, 6, 11],
        [1, 3, 7, 10],
    ]  # golden: what a resume must find


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([(3.0, 1.0), (5.0, 1.0), (4.0, 1.0)], (5.0, 1.0)),
        ([(-3.0, 1.0), (-5.0, 1.0)], (-3.0, 1.0)),
        ([(-2.0, 1.0)], (-2.0, 1.0)),
    ],
)
def test_the_largest_of_several_parts_is_the_largest_and_counts_once(parts, merged):
    """Waves, micro-batches, updates and ranks, whichever comes first; sums beside it add up."""
    sums: list[Sums] = [{"x/max": part, "x/mean": part, f"only/{i}": (1.0, 2.0)} for i, part in enumerate(parts)]
    for order in (sums, sums[::-1]):
        total = merge_sums(*order)
        assert total["x/max"] == merged
        assert total["x/mean"] == (sum(a for a, _ in parts), len(parts))
        assert all(total[f"only/{i}"] == (1.0, 2.0) for i in range(len(parts)))
    assert merge_sums() == {}


def test_the_largest_over_ranks_is_on_every_rank():
    def work(values: list[float]) -> Sums:
        rank = dist.get_rank()
        return merge_over_ranks({"x/max": (values[rank], 1.0), "x/mean": (values[rank], 2.0)} if values[rank] else {})

    assert run_ranks(work, 3, [2.0, 7.0, 0.0]) == [{"x/max": (7.0, 1.0), "x/mean": (9.0, 4.0)}] * 3


def test_staleness_counts_from_the_oldest_token():
    rows = rows_of(1)
    rows.weight_version[:] = [7, 5, 7, 6]
    assert staleness(rows, 7) == {"rollout/staleness/mean": (3.0, 4.0), "rollout/staleness/max": (2.0, 1.0)}
    assert staleness(rows_of(0), 7) == {}


@pytest.mark.parametrize(("interval", "due"), [(2, [1, 3, 4]), (0, []), (10, [4]), (None, []), (1, [0, 1, 2, 3, 4])])
def test_what_is_done_at_intervals_is_done_at_the_end_too(interval, due):
    run = SimpleNamespace(options=Options.from_args(num_rollout=5))
    assert [step for step in range(5) if Run._due(run, step, interval)] == due


class Recorder:
    """An engine that notes how it was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.params: list[SamplingParams] = []

    def generate(self, requests: list[Request], params: SamplingParams, on_finish: Any = None) -> list[Sample]:
        self.requests += requests
        self.params.append(params)
        ended = {"finish_reason": "stop", "weight_version": 0, "text": "", "status": "ok", "acc": 1.0}
        return [Sample(np.array([1]), np.zeros(1), **ended) for _ in requests]


RUN = {
    "rollout_temperature": 0.8, "rollout_top_k": 11, "rollout_max_response_len": 20,
    "eval_temperature": 0.6, "eval_top_p": 0.5, "eval_top_k": 7, "n_samples_per_eval_prompt": 3,
}  # fmt: skip


@pytest.mark.parametrize(("longest", "expected"), [(None, 20), (30, 30)])
def test_evaluation_draws_as_the_evaluation_options_say(longest, expected):
    engine = Recorder()
    run = SimpleNamespace(
        engine=engine, args=SimpleNamespace(seed=SEED), options=Options.from_args(**RUN, eval_max_response_len=longest)
    )
    collector = SimpleNamespace(
        problems=SimpleNamespace(stop_token_ids=(9,), eval=[Prompt("p", "", (1,), "7", "s")]),
        rewards=SimpleNamespace(score=lambda groups: {}),
    )  # fmt: skip
    report = Run._evaluate(run, collector)
    assert engine.params == [SamplingParams(expected, temperature=0.6, top_p=0.5, top_k=7, stop_token_ids=(9,))]
    assert len(engine.requests) == 3 and len({r.seed for r in engine.requests}) == 3 and report.k == 3


def test_rollouts_draw_as_the_rollout_options_say():
    expected = SamplingParams(20, temperature=0.8, top_p=1.0, top_k=11, stop_token_ids=(9,))
    assert Options.from_args(**RUN).train_sampling((9,)) == expected
