"""Whatever the parallel layout, the step is the paper's equation: loss, metrics, gradient norm, every gradient, and the
policy after two optimizer steps, against the equation in float64."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_helper import run_ranks
from layouts import DENSE, Layout
from literal_reference import Objective, Shape, Weights, adamw, loss_and_metrics, response
from tiny_trainer import VOCAB, rows_of, trainer_of
from whole_tensors import complete_gradients, whole

from megatron_dapo.training import checkpoint
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.types import Trajectories, merge_sums

METRIC, GRADIENT, AFTER = 2e-6, 1e-5, 5e-6
"""Relative bounds in fp32: a metric; a gradient's entry over the largest of its parameter; the loss after two steps."""

MODES = ("token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OBJECTIVES = [Objective(mode, entropy_coef=e, kl_coef=k) for mode in MODES for e, k in ((0.0, 0.0), (0.01, 0.05))]
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-4, "decay": 0.1, "clip": 1.0}
LR = 1e-2

FLAGS = (
    "--num-layers", "4", "--hidden-size", "32", "--ffn-hidden-size", "48", "--kv-channels", "8",
    "--init-method-std", "0.2", "--old-logprobs", "rollout", "--eps-clip-c", "3.0", "--lr", str(LR),
    "--adam-eps", str(ADAM["eps"]), "--save-interval", "0",
)  # fmt: skip
SHAPE = Shape(layers=4, heads=4, groups=2, head_dim=8, vocab=VOCAB)


@dataclasses.dataclass
class Expected:
    """What the equation gives for the batch and the weights that all layouts load."""

    rows: Trajectories
    weights: str
    reference: str
    metrics: list[dict[str, float]]
    gradients: list[Weights]
    norms: list[float]
    after: float


def float64(weights: Weights) -> Weights:
    return {name: value.double().requires_grad_() for name, value in weights.items()}


def save_random_policy(folder: Path, seed: int, *flags: str) -> Weights:
    """A checkpoint in ``folder/checkpoints``, and its weights."""

    def work() -> Weights:
        trainer = trainer_of(folder, *flags, "--seed", str(seed), "--save", str(folder / "checkpoints"))
        with torch.no_grad():  # norms of 1 and biases of 0 would hide their gradients' mistakes
            for p in trainer.model[0].parameters():
                if p.dim() == 1:
                    p.add_(0.2 * torch.randn_like(p))
        trainer.optimizer.reload_model_params()
        checkpoint.save(trainer, 0, None)
        return whole(trainer, lambda p: p)

    return run_ranks(work, 1)[0]


def ragged_rows(weights: Weights, shape: Shape) -> Trajectories:
    """``rows_of`` with a policy of before that lies around the present one, so that every side of the clip is in use."""
    rows, rng = rows_of(), np.random.default_rng(1)
    rows.advantages += 0.5  # a loss near 0 would have no relative error to speak of
    group = np.array([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3])
    rows = dataclasses.replace(rows, group=group)
    with torch.no_grad():
        for i in range(len(rows)):
            logp = response(weights, rows, i, shape)[0].numpy()
            rows.rollout_logprobs[i] = (logp + rng.uniform(-1.3, 0.7, len(logp))).astype(np.float32)
    return rows


def expect(folder: Path, shape: Shape, *flags: str) -> Expected:
    """Save two policies and compute what every layout must find."""
    weights = float64(save_random_policy(folder / "policy", 1, *flags))
    reference = float64(save_random_policy(folder / "reference", 2, *flags))
    rows = ragged_rows(weights, shape)
    metrics, gradients, norms = [], [], []
    for objective in OBJECTIVES:
        loss, found = loss_and_metrics(weights, reference, rows, shape, objective)
        loss.backward()
        metrics.append(found)
        gradients.append({name: p.grad for name, p in weights.items()})
        norms.append(float(torch.sqrt(sum((p.grad**2).sum() for p in weights.values()))))
        for p in weights.values():
            p.grad = None
    moments = {name: (torch.zeros_like(p.detach()), torch.zeros_like(p.detach())) for name, p in weights.items()}
    for number in (1, 2):
        loss_and_metrics(weights, reference, rows, shape, OBJECTIVES[0])[0].backward()
        adamw(weights, moments, number, LR, ADAM)
    after = float(loss_and_metrics(weights, reference, rows, shape, OBJECTIVES[0])[0])
    paths = (str(folder / name / "checkpoints") for name in ("policy", "reference"))
    return Expected(rows, *paths, metrics, gradients, norms, after)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return expect(tmp_path_factory.mktemp("dense"), SHAPE, *FLAGS)


def measure(folder: Path, expected: Expected, flags: tuple[str, ...]) -> dict[str, Any]:
    """On every rank of a layout: each objective's metrics, norm and gradients, then two steps and the loss after them."""
    trainer = trainer_of(folder, *flags, "--kl-coef", "1", "--load", expected.weights, "--ref-load", expected.reference)
    before = whole(trainer, lambda p: p)
    found: dict[str, Any] = {"metrics": [], "norms": [], "gradients": []}

    def gradients(objective: Objective) -> tuple[dict[str, float], float]:
        loss = dataclasses.replace(
            trainer.options.loss, loss_agg_mode=objective.mode, entropy_coef=objective.entropy_coef,
            kl_coef=objective.kl_coef, loss_norm_length=objective.norm_length,
        )  # fmt: skip
        trainer.options = dataclasses.replace(trainer.options, loss=loss)
        batch = build_minibatch(expected.rows, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch])
        trainer.fill_reference_logprobs([batch])
        local, norm = trainer.gradients(batch)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local)
        return {name: total / count for name, (total, count) in merge_sums(*parts).items()}, norm

    for objective in OBJECTIVES:
        metrics, norm = gradients(objective)
        complete_gradients(trainer)
        found["metrics"].append(metrics)
        found["norms"].append(norm)
        found["gradients"].append(whole(trainer, lambda p: p.main_grad))
    after = whole(trainer, lambda p: p)
    assert all(torch.equal(before[name], after[name]) for name in before), "the reference policy stayed in place"
    for _ in range(2):
        gradients(OBJECTIVES[0])
        batch = build_minibatch(expected.rows, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch])
        trainer.update(batch)
    with trainer.inference():
        pass
    found["after"] = gradients(OBJECTIVES[0])[0]["actor/pg_loss"]
    return found if dist.get_rank() == 0 else {}


def errors(expected: Expected, found: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """The largest error of each kind, and where it is."""
    worst: dict[str, tuple[float, str]] = {"metric": (0.0, ""), "gradient": (0.0, ""), "after": (0.0, "")}

    def note(kind: str, error: float, where: str) -> None:
        worst[kind] = max(worst[kind], (error, where))

    for number, objective in enumerate(OBJECTIVES):
        where = f"{objective.mode}{' with entropy and KL' if objective.kl_coef else ''}"
        for name, value in expected.metrics[number].items():
            note("metric", abs(found["metrics"][number][name] - value) / max(abs(value), 1e-3), f"{name}, {where}")
        norm = expected.norms[number]
        note("metric", abs(found["norms"][number] - norm) / norm, f"gradient norm, {where}")
        assert found["gradients"][number].keys() == expected.gradients[number].keys()
        for name, gradient in expected.gradients[number].items():
            largest = float(gradient.abs().max())
            difference = float((found["gradients"][number][name].double() - gradient).abs().max())
            note("gradient", difference / largest, f"{name}, {where}")
    note("after", abs(found["after"] - expected.after) / abs(expected.after), "")
    return worst


def selected(layouts: list[Layout]) -> list[Any]:
    """All of them with DAPO_MATRIX=full, as ``make test-matrix`` has it; else a covering subset."""
    full = os.environ.get("DAPO_MATRIX") == "full"
    return [pytest.param(layout, id=layout.name) for layout in layouts if full or layout.covering]


@pytest.mark.parametrize("layout", selected(DENSE))
def test_a_layout_computes_the_equation(tmp_path, dense, layout, record_property):
    found = run_ranks(measure, layout.ranks, tmp_path, dense, (*FLAGS, *layout.flags), deadline_s=240)[0]
    worst = errors(dense, found)
    record_property("errors", {kind: error for kind, (error, _) in worst.items()})
    for kind, bound in (("metric", METRIC), ("gradient", GRADIENT), ("after", AFTER)):
        error, where = worst[kind]
        assert error <= bound, f"{kind} off by {error:.2g} (bound {bound}): {where}"
