"""The learning rate of every optimizer step: warm-up, constant and decay, skipped and partial steps, resume."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from distributed_helper import run_ranks
from tiny_trainer import flat_weights, rows_of, step, trainer_of

from megatron_dapo.training import checkpoint
from megatron_dapo.training.step import Trainer

LR, LOWEST = 1e-3, 1e-4
RUN = ("--num-rollout", "4", "--lr-warmup-rollouts", "2", "--num-steps-per-rollout", "2", "--global-batch-size", "8")
"""Eight optimizer steps, of which the first four warm up."""

WARMUP = [0.25 * LR, 0.5 * LR, 0.75 * LR, LR]


def decayed(coefficient: float) -> float:
    return LOWEST + coefficient * (LR - LOWEST)


SCHEDULES = {
    "constant": [*WARMUP, LR, LR, LR, LR],
    "linear": [*WARMUP, decayed(0.75), decayed(0.5), decayed(0.25), LOWEST],
    "cosine": [*WARMUP, *(decayed(0.5 + 0.5 * math.cos(math.pi * x)) for x in (0.25, 0.5, 0.75)), LOWEST],
}


def rate(trainer: Trainer, **replaced: Any) -> float:
    return step(trainer, rows_of(**replaced))["actor/lr"][0]


@pytest.mark.parametrize("style", SCHEDULES)
def test_every_step_has_the_rate_of_the_schedule_whether_or_not_the_run_was_stopped(tmp_path, style):
    """The checkpoint is written in the middle of warm-up; what happens after it is done twice."""

    def begin() -> list[float]:
        trainer = trainer_of(tmp_path, *flags)
        first = [rate(trainer) for _ in range(3)]
        checkpoint.save(trainer, 1, {})
        return first + [rate(trainer) for _ in range(5)]

    def resume() -> list[float]:
        trainer = trainer_of(tmp_path, *flags)
        assert trainer.args.resumed
        return [rate(trainer) for _ in range(5)]

    flags = (*RUN, "--lr-decay-style", style, "--min-lr", str(LOWEST))
    assert run_ranks(begin, 1)[0] == pytest.approx(SCHEDULES[style], rel=1e-9)
    assert run_ranks(resume, 1)[0] == pytest.approx(SCHEDULES[style][3:], rel=1e-9)


def test_the_first_step_of_warm_up_moves_the_weights_by_its_rate(tmp_path):
    """Adam's first step is the rate times the gradient's sign, so the weights say which rate the optimizer had."""

    def work() -> tuple[float, float]:
        trainer = trainer_of(tmp_path, *RUN, "--weight-decay", "0", "--adam-eps", "1e-12")
        before = flat_weights(trainer)
        reported = rate(trainer)
        return reported, (flat_weights(trainer) - before).abs().max().item()

    reported, moved = run_ranks(work, 1)[0]
    assert reported == pytest.approx(0.25 * LR) and moved == pytest.approx(0.25 * LR, rel=1e-3)


def test_without_warm_up_the_first_step_has_the_whole_rate(tmp_path):
    flags = ("--num-steps-per-rollout", "2", "--global-batch-size", "8")
    assert run_ranks(lambda: rate(trainer_of(tmp_path, *flags)), 1)[0] == pytest.approx(LR)


def test_a_skipped_step_is_none_and_a_partial_one_is_a_whole_one(tmp_path):
    """The schedule counts optimizer steps, however many samples they had."""

    def work() -> list[float]:
        trainer, rows = trainer_of(tmp_path, *RUN), rows_of()
        rates = [rate(trainer)]
        for broken in (
            {"loss_mask": [np.zeros_like(m) for m in rows.loss_mask]},
            {"advantages": np.full(16, math.inf)},
        ):
            assert "actor/lr" not in step(trainer, rows_of(**broken))
        rates.append(step(trainer, rows.take([0, 1, 3]))["actor/lr"][0])
        return [*rates, rate(trainer)]

    assert run_ranks(work, 1)[0] == pytest.approx(WARMUP[:3])
