"""The training step through Megatron: invariance to how a batch is packed, and the steps that must be skipped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributed_helper import run_ranks
from tiny import MODEL
from tiny_trainer import VOCAB, flat_weights, rows_of, step, trainer_of
from tolerances import relative_bound

from megatron_dapo.distributed.collectives import merge_over_ranks
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.types import Sums

BOUND = relative_bound(MODEL["num_layers"], passes=3)
"""Of a gradient's norm; what is the mean of a loss is closer."""


@pytest.mark.parametrize("mode", ["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_neither_the_token_budget_nor_data_parallel_changes_the_step(tmp_path, mode):
    """The same loss and gradient norm from one micro-batch, from many, and from two ranks."""

    def work(budget: int) -> dict[str, float]:
        trainer = trainer_of(tmp_path, "--loss-agg-mode", mode, "--max-tokens-per-gpu", str(budget))
        sums = step(trainer, rows_of())
        return {name: sums[name][0] / sums[name][1] for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy")}

    whole = run_ranks(work, 1, 10_000)[0]
    assert whole["actor/grad_norm"] > 1e-3
    for ranks, budget in ((1, 40), (2, 10_000), (2, 33)):
        assert run_ranks(work, ranks, budget)[0] == pytest.approx(whole, rel=BOUND), (ranks, budget)


def test_more_ranks_than_samples_still_step(tmp_path):
    def work() -> float:
        sums = step(trainer_of(tmp_path), rows_of().take([0]))
        return sums["actor/grad_norm"][0]

    assert run_ranks(work, 2)[0] == pytest.approx(run_ranks(work, 1)[0], rel=BOUND)


def test_a_step_without_a_token_in_the_loss_is_skipped_on_all_ranks(tmp_path):
    def work() -> tuple[float, bool, int]:
        trainer = trainer_of(tmp_path)
        before, rows = flat_weights(trainer), rows_of()
        masked = rows_of(loss_mask=[np.zeros_like(m) for m in rows.loss_mask])
        sums = step(trainer, masked)
        return (
            sums["actor/skipped_no_tokens"][0],
            torch.equal(before, flat_weights(trainer)),
            trainer.scheduler.num_steps,
        )

    assert run_ranks(work, 2) == [(1.0, True, 0)] * 2


BROKEN = {"nan": math.nan, "inf": math.inf, "a gradient that overflows to inf": 1e30}


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo", "nll"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(tmp_path, loss):
    """One sample of one rank is enough; the next, healthy step is taken. NaN and inf are undefined for every loss; 1e30 is
    a number, so next-token training on what was right does not mind it."""

    def work() -> list[tuple[Sums, bool]]:
        trainer = trainer_of(tmp_path, "--policy-loss", loss)
        before, found = flat_weights(trainer), []
        for value in (*BROKEN.values(), 1.0):
            advantages = rows_of().advantages.copy()
            advantages[3] = value
            found.append((step(trainer, rows_of(advantages=advantages)), torch.equal(before, flat_weights(trainer))))
        return found

    for found in run_ranks(work, 2):
        for (name, value), (sums, untouched) in zip((*BROKEN.items(), ("healthy", 1.0)), found, strict=True):
            skipped = loss != "nll" or not math.isfinite(value)
            if name == "healthy" or not skipped:
                assert sums["actor/skipped_nonfinite"] == (0.0, 1.0) and not untouched, name
                assert all(math.isfinite(total) for total, _ in sums.values())
            else:
                assert sums == {"actor/skipped_nonfinite": (1.0, 1.0)} and untouched, name


def test_tokens_that_the_policy_before_gave_probability_zero_leave_a_step_that_is_taken(tmp_path):
    """They are counted, and every metric is finite."""

    def work() -> Sums:
        trainer, rows = trainer_of(tmp_path, "--old-logprobs", "rollout", "--policy-loss", "gspo"), rows_of()
        rows.rollout_logprobs[0][:1] = rows.rollout_logprobs[7][-1:] = -math.inf
        batch = build_minibatch(rows, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch])
        return merge_over_ranks(trainer.update(batch))

    for sums in run_ranks(work, 2):
        tokens = sum(int(m.sum()) for m in rows_of().loss_mask)
        assert sums["actor/zero_prob"] == (2.0, tokens) and sums["actor/pg_loss"][1] == tokens
        assert sums["actor/skipped_nonfinite"] == (0.0, 1.0) and 0 < sums["actor/grad_norm"][0] < math.inf
        assert all(math.isfinite(total) for total, _ in sums.values())


def test_the_first_ratio_is_one_and_later_ones_are_not(tmp_path):
    def work() -> list[float]:
        trainer = trainer_of(tmp_path, "--num-steps-per-rollout", "2", "--global-batch-size", "8")
        batches = [
            build_minibatch(rows_of().take(part), trainer.options, trainer.layout) for part in (range(8), range(8, 16))
        ]
        trainer.fill_old_logprobs(batches)
        return [total / count for total, count in (trainer.update(b)["actor/ratio_mean"] for b in batches)]

    first, second = run_ranks(work, 1)[0]
    assert first == 1.0 and second != 1.0


def test_what_stands_in_masked_places_reaches_nothing(tmp_path):
    """A response that is not in the loss may hold anything: the step is the same to the bit."""

    def work(poison: float) -> tuple[float, list[float]]:
        trainer = trainer_of(tmp_path)
        rows = rows_of()
        rows.rollout_logprobs[2][:] = poison
        rows.advantages[2] = poison
        norm = step(trainer, rows)["actor/grad_norm"][0]
        return norm, flat_weights(trainer)[:50].tolist()

    assert run_ranks(work, 1, 0.5) == run_ranks(work, 1, math.nan)


@pytest.mark.parametrize("flags", [(), ("--context-parallel-size", "2")], ids=["", "context parallel"])
def test_sequences_of_a_packed_row_do_not_see_each_other(tmp_path, flags):
    """Another text in one sample changes that sample's log-probs and nobody else's, to the bit."""

    def work() -> list[list[tuple[int, list[float]]]]:
        trainer, found = trainer_of(tmp_path, *flags), []
        for shift in (0, 1):
            rows = rows_of()
            rows.tokens[5] = (rows.tokens[5] + shift) % VOCAB
            batch = build_minibatch(rows, trainer.options, trainer.layout)
            trainer.fill_old_logprobs([batch, batch])
            assert len(batch.microbatches) < 16
            found.append([
                (micro.sequence[micro.sequence == s].numel(), micro.old_logprobs[micro.sequence == s].tolist())
                for micro in batch
                for s in range(micro.num_sequences)
            ])  # fmt: skip
        return found

    changed = 0
    for before, after in run_ranks(work, 2 if flags else 1, deadline_s=500):
        changed += sum(a != b for a, b in zip(before, after, strict=True))
        assert len(before) == 16
    assert changed == (2 if flags else 1)
