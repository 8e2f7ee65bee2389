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
from layouts import CP2, DENSE, EXPERTS, SEVERAL, TIED, Layout
from literal_reference import Objective, Shape, Weights, adamw, auxiliary_loss, loss_and_metrics, response
from tiny_trainer import VOCAB, rows_of, trainer_of
from tolerances import BF16, CONTROL, mean_bound, relative_bound
from whole_tensors import complete_gradients, whole

from megatron_dapo.data.packing import pack_sequences
from megatron_dapo.training import checkpoint
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import Trajectories, merge_sums

LAYERS = 4
BOUNDS = {"metric": relative_bound(LAYERS), "gradient": relative_bound(LAYERS, 3), "after": relative_bound(LAYERS, 3)}
"""In fp32, relative: a metric or the gradient norm; a gradient's entry to the largest of its parameter; the policy loss of
the batch after two optimizer steps."""

MODES = ("token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OBJECTIVES = [Objective(mode, entropy_coef=e, kl_coef=k) for mode in MODES for e, k in ((0.0, 0.0), (0.01, 0.05))]
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-4, "decay": 0.1, "clip": 1.0}
LR, AUXILIARY = 1e-2, 0.1

COMMON = (
    "--num-layers", str(LAYERS), "--hidden-size", "32", "--ffn-hidden-size", "48", "--kv-channels", "8",
    "--init-method-std", "0.2", "--old-logprobs", "rollout", "--eps-clip-c", "3.0", "--lr", str(LR),
    "--adam-eps", str(ADAM["eps"]), "--save-interval", "0",
)  # fmt: skip
MIXTURE = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "24", "--qk-layernorm",
    "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", str(AUXILIARY),
)  # fmt: skip
IN_BF16 = ("one rank", "dp2, overlap", "tp2 sp", "pp2, many micro-batches", "cp2, many micro-batches")
SHAPE = Shape(layers=LAYERS, heads=4, groups=2, head_dim=8, vocab=VOCAB)


@dataclasses.dataclass
class Expected:
    """What the equation gives, by objective."""

    metrics: list[dict[str, float]]
    gradients: list[Weights]
    norms: list[float]
    after: float


@dataclasses.dataclass
class Case:
    """A model in two policies (the one trained, the reference), saved where every layout loads them, and a batch."""

    flags: tuple[str, ...]
    shape: Shape
    folder: Path
    objectives: list[Objective]
    bf16: bool = False
    tied: bool = False
    policy: Weights = dataclasses.field(init=False)
    reference: Weights = dataclasses.field(init=False)
    rows: Trajectories = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.policy = save_random_policy(self.folder / "policy", 0.0, self.flags, self.overrides)
        self.reference = save_random_policy(self.folder / "reference", 0.02, self.flags, self.overrides)
        if self.bf16:
            for weights in (self.policy, self.reference):
                weights.update({name: value.bfloat16().float() for name, value in weights.items()})
        self.rows = ragged_rows(float64(self.policy), self.shape, steps=self.bf16)

    @property
    def overrides(self) -> dict[str, Any]:
        return {"untie_embeddings_and_output_weights": not self.tied}

    def expected(self, plan: list[list[Any]] | None = None, multiple: int = 1) -> Expected:
        """By the equation; ``plan``, the micro-batches, for the auxiliary loss of experts."""
        weights, reference = float64(self.policy), float64(self.reference)
        metrics, gradients, norms = [], [], []

        def backward(objective: Objective) -> dict[str, float]:
            loss, found = loss_and_metrics(weights, reference, self.rows, self.shape, objective)
            if plan:
                trained, mean = auxiliary_loss(weights, self.rows, plan, multiple, self.shape)
                loss, found = loss + AUXILIARY * trained, found | {"moe/load_balancing_loss": mean}
            loss.backward()
            return found

        for objective in self.objectives:
            metrics.append(backward(objective))
            gradients.append({name: p.grad for name, p in weights.items()})
            norms.append(float(torch.sqrt(sum((g**2).sum() for g in gradients[-1].values()))))
            for p in weights.values():
                p.grad = None
        moments = {name: (torch.zeros_like(p.detach()), torch.zeros_like(p.detach())) for name, p in weights.items()}
        for number in (1, 2):
            backward(self.objectives[0])
            adamw(weights, moments, number, LR, ADAM)
        after = loss_and_metrics(weights, reference, self.rows, self.shape, self.objectives[0])[0]
        return Expected(metrics, gradients, norms, float(after))


def float64(weights: Weights) -> Weights:
    return {name: value.double().requires_grad_() for name, value in weights.items()}


def save_random_policy(folder: Path, away: float, flags: tuple[str, ...], overrides: dict[str, Any]) -> Weights:
    """A checkpoint in ``folder/checkpoints``, ``away`` (a standard deviation) from the policy of 0; its weights. A reference
    policy far away would make KL the exponential of a large number, and so would measure little else than its rounding."""

    def work() -> Weights:
        save = ("--seed", "1", "--save", str(folder / "checkpoints"))
        trainer = trainer_of(folder, *flags, *save, **overrides)
        with torch.no_grad():  # norms of 1 and biases of 0 would hide their gradients' mistakes
            for p in trainer.model[0].parameters():
                if p.dim() == 1:
                    p.add_(0.2 * torch.randn_like(p))
            for p in trainer.model[0].parameters():
                p.add_(away * torch.randn_like(p))
        trainer.optimizer.reload_model_params()
        checkpoint.save(trainer, 0, None)
        return whole(trainer, lambda p: p)

    return run_ranks(work, 1)[0]


def ragged_rows(weights: Weights, shape: Shape, steps: bool) -> Trajectories:
    """``rows_of`` in groups of 3, 5, 2 and 6, with a policy of before that lies around the present one, so that every side
    of the clip is in use; in ``steps``, far from its edges."""
    rows, rng = rows_of(), np.random.default_rng(1)
    rows.advantages += 0.5  # a loss near 0 would have no relative error to speak of
    rows.group = np.repeat(np.arange(4), [3, 5, 2, 6])
    with torch.no_grad():
        for i in range(len(rows)):
            logp = response(weights, rows, i, shape)[0].numpy()
            drift = rng.choice([-1.3, -0.4, 0.0, 0.4], len(logp)) if steps else rng.uniform(-1.3, 0.7, len(logp))
            rows.rollout_logprobs[i] = (logp + drift).astype(np.float32)
    return rows


def measure(folder: Path, case: Case, flags: tuple[str, ...]) -> dict[str, Any]:
    """On every rank of a layout: each objective's metrics, norm and gradients, then two steps and the loss after them."""
    saved = {name: str(case.folder / name / "checkpoints") for name in ("policy", "reference")}
    load = ("--kl-coef", "1", "--load", saved["policy"], "--ref-load", saved["reference"])
    trainer = trainer_of(folder, *flags, *load, **case.overrides)
    before = whole(trainer, lambda p: p)
    found: dict[str, Any] = {"metrics": [], "norms": [], "gradients": [], "multiple": trainer.layout.multiple}

    def begin(objective: Objective) -> Any:
        loss = dataclasses.replace(
            trainer.options.loss, loss_agg_mode=objective.mode, entropy_coef=objective.entropy_coef,
            kl_coef=objective.kl_coef, loss_norm_length=objective.norm_length,
        )  # fmt: skip
        trainer.options = dataclasses.replace(trainer.options, loss=loss)
        batch = build_minibatch(case.rows, trainer.options, trainer.layout)
        trainer.fill_old_logprobs([batch])
        trainer.fill_reference_logprobs([batch])
        return batch

    def gradients(objective: Objective) -> tuple[dict[str, float], float]:
        local, norm = trainer.gradients(begin(objective))
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local)
        return {name: total / count for name, (total, count) in merge_sums(*parts).items()}, norm

    for objective in case.objectives:
        metrics, norm = gradients(objective)
        complete_gradients(trainer)
        found["metrics"].append(metrics)
        found["norms"].append(norm)
        found["gradients"].append(whole(trainer, lambda p: p.main_grad))
    after = whole(trainer, lambda p: p)
    assert all(torch.equal(before[name], after[name]) for name in before), "the reference policy stayed in place"
    for _ in range(2):
        trainer.update(begin(case.objectives[0]))
    found["after"] = gradients(case.objectives[0])[0]["actor/pg_loss"]
    lengths = np.array([len(t) for t in case.rows.tokens])
    layout, budget = trainer.layout, trainer.options.token_budget(trainer.layout.cp_size, trainer.layout.multiple)
    found["plan"] = pack_sequences(
        lengths, layout.dp_size, budget, layout.multiple, layout.micro_multiple, layout.attention_span
    )
    return found if dist.get_rank() == 0 else {}


def errors(case: Case, expected: Expected, found: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """The largest error of each kind, and where it is."""
    worst = {"metric": (0.0, ""), "gradient": (0.0, ""), "after": (0.0, "")}

    def note(kind: str, error: float, where: str) -> None:
        worst[kind] = max(worst[kind], (error, where))

    for number, objective in enumerate(case.objectives):
        where = f"{objective.mode}{' with entropy and KL' if objective.kl_coef else ''}"
        for name, value in expected.metrics[number].items():
            note("metric", abs(found["metrics"][number][name] - value) / max(abs(value), 1e-3), f"{name}, {where}")
        norm = expected.norms[number]
        note("metric", abs(found["norms"][number] - norm) / norm, f"gradient norm, {where}")
        assert found["gradients"][number].keys() == expected.gradients[number].keys()
        for name, gradient in expected.gradients[number].items():
            difference = float((found["gradients"][number][name].double() - gradient).abs().max())
            note("gradient", difference / float(gradient.abs().max()), f"{name}, {where}")
    note("after", abs(found["after"] - expected.after) / abs(expected.after), "")
    return worst


def selected(layouts: list[Layout]) -> list[Any]:
    """All of them with DAPO_MATRIX=full, as ``make test-matrix`` has it; else a covering subset."""
    full = os.environ.get("DAPO_MATRIX") == "full"
    return [pytest.param(layout, id=layout.name) for layout in layouts if full or layout.covering]


def compare(
    folder: Path,
    case: Case,
    layout: Layout,
    record: Any,
    expected: Expected | None = None,
    bounds: dict[str, float] = BOUNDS,
) -> None:
    """Run a layout and hold it to the bounds. Without ``expected`` it follows from the layout's own micro-batches."""
    flags = (*case.flags, *(("--bf16",) if case.bf16 else ()), *layout.flags)
    found = run_ranks(measure, layout.ranks, folder, case, flags, deadline_s=500)[0]
    worst = errors(case, expected or case.expected(found["plan"], found["multiple"]), found)
    record("errors", {kind: error for kind, (error, _) in worst.items()})
    for kind, bound in bounds.items():
        error, where = worst[kind]
        assert error <= bound, f"{kind} off by {error:.2g} (bound {bound}): {where}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    case = Case(COMMON, SHAPE, tmp_path_factory.mktemp("dense"), OBJECTIVES)
    return case, case.expected()


@pytest.mark.parametrize("layout", selected(DENSE))
def test_a_layout_computes_the_equation(tmp_path, dense, layout, record_property):
    case, expected = dense
    compare(tmp_path, case, layout, record_property, expected)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    case = Case(COMMON, SHAPE, tmp_path_factory.mktemp("tied"), OBJECTIVES[:2], tied=True)
    return case, case.expected()


@pytest.mark.parametrize("layout", selected(TIED))
def test_tied_embeddings_have_the_gradients_of_both_ends(tmp_path, tied, layout, record_property):
    """Under pipeline parallelism the embedding lives on the first and the last stage."""
    case, expected = tied
    compare(tmp_path, case, layout, record_property, expected)


def broken(factor: str) -> None:
    """Break the loss as others have: a factor of the data-parallel size, the context-parallel size, or micro-batches."""
    loss_func, run = Trainer.loss_func, Trainer._run

    def count_microbatches(self: Trainer, batch: Any, forward_only: bool) -> list[Any]:
        self.num_microbatches = len(batch.microbatches)
        return run(self, batch, forward_only)

    def scaled(self: Trainer, batch: Any, output: Any, non_loss_data: bool = False) -> Any:
        result = loss_func(self, batch, output, non_loss_data)
        if non_loss_data:
            return result
        sizes = {"dp": self.layout.dp_size, "cp": self.layout.cp_size, "microbatches": self.num_microbatches}
        return result[0] / sizes[factor], *result[1:]

    Trainer.loss_func, Trainer._run = scaled, count_microbatches


@pytest.mark.parametrize(
    ("factor", "ranks", "flags"), [("dp", 2, ()), ("cp", 2, CP2), ("microbatches", 1, SEVERAL)], ids=str
)
def test_a_wrong_denominator_is_noticed(tmp_path, dense, factor, ranks, flags):
    """The matrix bites: with each of the public mistakes in the code, gradients are off by far more than the bound."""
    case, expected = dense

    def work() -> dict[str, Any]:
        broken(factor)
        return measure(tmp_path, case, (*COMMON, *flags))

    worst = errors(case, expected, run_ranks(work, ranks)[0])
    assert worst["gradient"][0] > CONTROL * BOUNDS["gradient"]


@pytest.mark.parametrize(
    "layout", [layout for layout in DENSE if layout.name in IN_BF16], ids=lambda layout: layout.name
)
def test_a_layout_in_bf16(tmp_path, rounded, layout, record_property):
    """Against the equation of the rounded weights. Activations are rounded as well, so that the bound is bf16's own, and
    the batch keeps off the edges of the clip, where rounding decides."""
    case, expected = rounded
    bound = mean_bound(LAYERS, int(sum(mask.sum() for mask in case.rows.loss_mask)), BF16)
    compare(tmp_path, case, layout, record_property, expected, {"metric": bound})


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    flags = (*COMMON, "--init-method-std", "0.05")
    case = Case(flags, SHAPE, tmp_path_factory.mktemp("bf16"), OBJECTIVES[:2], bf16=True)
    return case, case.expected()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    shape = dataclasses.replace(SHAPE, topk=2)
    return Case((*COMMON, *MIXTURE), shape, tmp_path_factory.mktemp("mixture"), OBJECTIVES[:2])


@pytest.mark.parametrize("layout", selected(EXPERTS))
def test_a_layout_of_experts_computes_the_equation(tmp_path, mixture, layout, record_property):
    """The auxiliary loss included: its gradient has the stated weight however many tokens are in DAPO's loss."""
    compare(tmp_path, mixture, layout, record_property)
