"""The training step through Megatron: invariance to how a batch is packed, and the steps that must be skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_helper import run_ranks
from tiny import MODEL

from megatron_dapo.recipe import toml_value
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.types import Sums, Trajectories, merge_sums

VOCAB = 27


def trainer_of(folder: Path, *flags: str) -> Any:
    recipe = folder / "recipe.toml"
    recipe.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in MODEL.items()))
    common = [
        "--rollout-batch-size",
        "4",
        "--n-samples-per-prompt",
        "4",
        "--global-batch-size",
        "16",
        "--num-steps-per-rollout",
        "1",
    ]
    lengths = [
        "--rollout-max-prompt-len",
        "8",
        "--rollout-max-response-len",
        "24",
        "--overlong-buffer-len",
        "0",
        "--lr",
        "1e-3",
    ]
    argv = [str(recipe), *common, *lengths, "--vocab-size", str(VOCAB), "--run-dir", str(folder / "run")]
    return build_trainer(*parse([*argv, "--lr-warmup-rollouts", "0", *flags]))


def rows_of(n: int = 16, **replaced: Any) -> Trajectories:
    """Ragged samples: one of a single response token, one fully masked, the rest as they come."""
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(2, 9, n), rng.integers(2, 25, n)
    response[1] = 1
    mask = [np.ones(r, bool) for r in response]
    mask[2][:] = False
    columns: dict[str, Any] = {
        "tokens": [rng.integers(2, VOCAB, p + r) for p, r in zip(prompt, response, strict=True)],
        "prompt_lengths": prompt,
        "rollout_logprobs": [np.full(r, -3.0, np.float32) for r in response],
        "loss_mask": mask,
        "advantages": rng.normal(size=n),
        "rewards": np.zeros(n),
        "acc": np.zeros(n),
        "group": np.arange(n) // 4,
        "weight_version": np.zeros(n, np.int64),
    }
    return Trajectories(**(columns | replaced))


def step(trainer: Any, rows: Trajectories) -> Sums:
    """One optimizer step; metrics of all ranks."""
    local = trainer.update(build_minibatch(rows, trainer.options, trainer.layout))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return merge_sums(*parts)


def flat_weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model[0].parameters()])


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
        assert run_ranks(work, ranks, budget)[0] == pytest.approx(whole, rel=2e-5), (ranks, budget)


def test_more_ranks_than_samples_still_step(tmp_path):
    def work() -> float:
        sums = step(trainer_of(tmp_path), rows_of().take([0]))
        return sums["actor/grad_norm"][0]

    assert run_ranks(work, 2)[0] == pytest.approx(run_ranks(work, 1)[0], rel=1e-5)


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


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(tmp_path):
    """One sample of one rank is enough; the next, healthy step is taken."""

    def work() -> tuple[float, bool, bool, float]:
        trainer = trainer_of(tmp_path)
        before = flat_weights(trainer)
        advantages = rows_of().advantages.copy()
        advantages[3] = math.inf
        skipped = step(trainer, rows_of(advantages=advantages))["actor/skipped_nonfinite"][0]
        untouched = torch.equal(before, flat_weights(trainer))
        norm = step(trainer, rows_of())["actor/grad_norm"][0]
        return skipped, untouched, torch.equal(before, flat_weights(trainer)), norm

    for skipped, untouched, stuck, norm in run_ranks(work, 2):
        assert skipped == 1.0 and untouched and not stuck and math.isfinite(norm)


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
