"""What no run should see and one does: ratios beyond every bound, probabilities of 0, NaN. All losses behave alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from token_batches import ragged_step

from megatron_dapo.algorithm import losses
from megatron_dapo.algorithm.losses import MAX_LOG_RATIO, TokenBatch, policy_objective
from megatron_dapo.config import LossOptions

LOSSES = sorted(losses.LOSSES.known)
INF, NAN = math.inf, math.nan
CORRECTIONS = ("none", "tis", "icepop")
RECIPE = {"eps_clip": 0.2, "eps_clip_high": 0.28}


def responses(columns: dict[str, list[list[float]]], dtype: torch.dtype = torch.float64) -> TokenBatch:
    """A batch of unmasked responses, a list of tokens each; ``logprobs_T`` is a leaf."""
    lengths = torch.tensor([len(row) for row in columns["logprobs_T"]])
    flat = {name: torch.tensor([x for row in rows for x in row], dtype=dtype) for name, rows in columns.items()}
    ones = torch.ones(int(lengths.sum()), dtype=dtype)
    given = {"weights_T": ones, "rollout_logprobs_T": None, "entropy_T": None, **flat}
    given["logprobs_T"].requires_grad_()
    return TokenBatch(
        mask_T=ones.bool(),
        sequence_T=torch.arange(len(lengths)).repeat_interleave(lengths),
        num_sequences=len(lengths),
        **given,
    )


def evaluate(batch: TokenBatch, **options: Any) -> tuple[float, list[float], dict[str, tuple[float, float]]]:
    """Loss, its gradient in every log-prob, metrics."""
    loss, report = policy_objective(batch, LossOptions(**RECIPE, **options))
    (gradient,) = torch.autograd.grad(loss, batch.logprobs_T)
    return loss.item(), gradient.tolist(), {name: (a.item(), b.item()) for name, (a, b) in report.items()}


def beyond(name: str, logprob: float, side: int, advantage: float) -> tuple[float, float]:
    """(loss, slope) of a token whose log ratio is beyond the bound, by the statement of the module."""
    clipped = 1.28 if side > 0 else 0.8
    if name == "nll":
        return (-logprob, -1.0) if advantage > 0 else (0.0, 0.0)
    if name == "cispo":  # its gradient is log pi's, not the ratio's
        return -clipped * advantage * logprob, -clipped * advantage
    ratio = math.exp(side * MAX_LOG_RATIO)
    return -advantage * (min(ratio, 1.28) if advantage > 0 else max(ratio, 0.8)), 0.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("distance", [20.1, 700.0, 1e30])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_ratio_beyond_the_bound_is_clamped_and_has_no_gradient(name, advantage, side, distance, tokens):
    """A response beyond, and one inside that learns as it does alone."""
    far = -1.0 if side > 0 else -distance
    columns = {
        "logprobs_T": [[far] * tokens, [-0.5, -0.7]],
        "old_logprobs_T": [[far - side * distance] * tokens, [-0.6, -0.6]],
        "advantages_T": [[advantage] * tokens, [1.0, 1.0]],
    }
    loss, gradient, report = evaluate(responses(columns), policy_loss=name)
    inside, slopes, _ = evaluate(responses({key: rows[1:] for key, rows in columns.items()}), policy_loss=name)
    value, slope = beyond(name, far, side, advantage)
    assert loss == pytest.approx(tokens * value + inside, rel=1e-12)
    assert gradient == pytest.approx([slope] * tokens + slopes, rel=1e-12, abs=1e-15) and any(slopes)
    assert all(math.isfinite(total) for total, _ in report.values())
    bounded = -side * MAX_LOG_RATIO * tokens - 0.1 + 0.1
    assert report["actor/ppo_kl"][0] == pytest.approx(bounded) and report["actor/zero_prob"] == (0.0, tokens + 2)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize(("log_ratio", "slope"), [(19.9, math.exp(19.9)), (20.0, math.exp(20.0)), (20.1, 0.0)])
def test_inside_the_bound_a_token_of_negative_advantage_learns(name, log_ratio, slope):
    """One token of 4.9e8 x A is what the dual clip is for; outside the bound there is nothing."""
    batch = responses({"logprobs_T": [[-1.0]], "old_logprobs_T": [[-1.0 - log_ratio]], "advantages_T": [[-1.0]]})
    loss, gradient, _ = evaluate(batch, policy_loss=name)
    assert gradient == pytest.approx([slope]) and loss == pytest.approx(math.exp(min(log_ratio, 20.0)))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("where", [("logprobs_T",), ("old_logprobs_T",), ("logprobs_T", "old_logprobs_T")])
def test_a_token_of_probability_zero_is_left_out_of_all_but_the_denominator(name, correction, where):
    step, place = ragged_step(), 7
    options = {
        "policy_loss": name, "rollout_correction": correction, "loss_agg_mode": "seq-mean-token-mean",
        "entropy_coef": 0.1, "kl_coef": 0.1, "icepop_range": [0.01, 100.0],
    }  # fmt: skip
    packed = step.pack([0, 1, 2, 4], LossOptions(loss_agg_mode="seq-mean-token-mean"))
    assert packed.mask_T[place]
    columns = {k: v.detach().clone() for k, v in vars(packed).items() if isinstance(v, torch.Tensor)}
    columns["reference_logprobs_T"] = columns["old_logprobs_T"] - 0.3

    def run(**changed: torch.Tensor) -> tuple[float, list[float], dict[str, tuple[float, float]]]:
        leaves = columns | changed
        leaves["logprobs_T"] = leaves["logprobs_T"].clone().requires_grad_()
        return evaluate(TokenBatch(**leaves, num_sequences=4), **options)

    impossible = {key: columns[key].index_fill(0, torch.tensor(place), -INF) for key in where}
    loss, gradient, report = run(**impossible)
    expected, slopes, without = run(mask_T=columns["mask_T"].index_fill(0, torch.tensor(place), False))
    assert loss == pytest.approx(expected, rel=1e-12) and math.isfinite(loss)
    assert gradient == pytest.approx(slopes, rel=1e-12, abs=1e-15)
    assert gradient[place] == 0 and all(map(math.isfinite, gradient)) and any(gradient)
    assert all(math.isfinite(total) for total, _ in report.values())
    count = int(columns["mask_T"].sum())
    assert report["actor/zero_prob"] == (1.0, count) and report["actor/pg_loss"][1] == count
    for metric in ("actor/entropy", "actor/ratio_mean", "actor/ppo_kl", "actor/kl_loss"):
        assert report[metric] == pytest.approx(without[metric]), metric


@pytest.mark.parametrize("name", LOSSES)
def test_a_response_of_impossible_tokens_alone_adds_nothing(name):
    batch = responses({
        "logprobs_T": [[-INF, -INF], [-0.5]], "old_logprobs_T": [[-INF, -1.0], [-0.6]], "advantages_T": [[1.0, 1.0], [1.0]],
    })  # fmt: skip
    loss, gradient, report = evaluate(batch, policy_loss=name)
    assert math.isfinite(loss) and gradient[:2] == [0.0, 0.0] and gradient[2] < 0
    assert report["actor/zero_prob"] == (2.0, 3.0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("correction", "weight"), [("none", 1.0), ("tis", 2.0), ("icepop", 0.0)])
@pytest.mark.parametrize("engines", [-INF, torch.finfo(torch.float64).min])
def test_what_the_engine_thinks_impossible_is_a_ratio_beyond_the_bound(name, correction, weight, engines):
    columns = {"logprobs_T": [[-0.5]], "old_logprobs_T": [[-0.6]], "advantages_T": [[1.0]]}
    plain, slopes, _ = evaluate(responses(columns), policy_loss=name)
    batch = responses(columns | {"rollout_logprobs_T": [[engines]]})
    loss, gradient, report = evaluate(batch, policy_loss=name, rollout_correction=correction)
    assert loss == pytest.approx(weight * plain) and gradient == pytest.approx([weight * slopes[0]])
    assert report["mismatch/logprob_abs_diff"] == (20.0, 1.0)
    assert report["mismatch/k3"][0] == pytest.approx(math.exp(20) - 1 - 20)


@pytest.mark.parametrize(
    ("policy", "reference", "value", "slope"),
    [
        (-1.0, -INF, math.exp(-20) - 1 + 20, 0.0),
        (-1e30, -1.0, math.exp(20) - 1 - 20, 0.0),
        (-INF, -1.0, 0.0, 0.0),  # left out
        (-INF, -INF, 0.0, 0.0),
        (-1.0, -1.5, math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_the_kl_term_at_its_edges(name, policy, reference, value, slope):
    batch = responses({
        "logprobs_T": [[policy]], "old_logprobs_T": [[-1.0]], "advantages_T": [[0.0]], "reference_logprobs_T": [[reference]],
    })  # fmt: skip
    loss, gradient, report = evaluate(batch, policy_loss=name, kl_coef=1.0)
    assert loss == pytest.approx(value) and gradient == pytest.approx([slope])
    assert report["actor/kl_loss"][0] == pytest.approx(value)


UNDEFINED = [
    ("logprobs_T", NAN), ("logprobs_T", INF), ("old_logprobs_T", NAN), ("old_logprobs_T", INF), ("advantages_T", NAN),
    ("advantages_T", INF), ("advantages_T", -INF), ("weights_T", NAN), ("weights_T", INF), ("reference_logprobs_T", NAN),
    ("entropy_T", NAN), ("entropy_T", INF),
]  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("column", "value"), UNDEFINED)
def test_what_is_undefined_is_nan_in_the_loss_and_in_every_gradient(name, correction, column, value):
    """So that the gradient's norm says it on every rank, whatever a clip would have hidden."""
    columns = {
        "logprobs_T": [[-0.5, -0.1], [-1.0]], "old_logprobs_T": [[-0.6, -2.0], [-1.0]],
        "advantages_T": [[1.0, 1.0], [-1.0]], "rollout_logprobs_T": [[-0.6, -2.0], [-1.0]],
        "weights_T": [[1.0, 1.0], [2.0]], "reference_logprobs_T": [[-0.5, -0.1], [-1.0]], "entropy_T": [[0.1, 0.2], [0.3]],
    }  # fmt: skip
    options = {"policy_loss": name, "rollout_correction": correction, "entropy_coef": 0.1, "kl_coef": 0.1}
    healthy, slopes, _ = evaluate(responses(columns), **options)
    assert math.isfinite(healthy) and all(map(math.isfinite, slopes))
    for place in ((0, 1), (1, 0)):
        poisoned = {key: [list(row) for row in rows] for key, rows in columns.items()}
        poisoned[column][place[0]][place[1]] = value
        loss, gradient, report = evaluate(responses(poisoned), **options)
        assert math.isnan(loss) and all(map(math.isnan, gradient)), (loss, gradient)
        assert math.isnan(report["actor/pg_loss"][0])


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_that_overflows_is_undefined_or_bounded(name):
    """Log-probs that fp32 can hold and their sum cannot: finite with a finite gradient, or NaN with a gradient of NaN."""
    rows = {"logprobs_T": [[-3e38, -3e38]], "old_logprobs_T": [[-1.0, -1.0]], "advantages_T": [[1.0, 1.0]]}
    loss, gradient, report = evaluate(responses(rows, torch.float32), policy_loss=name)
    unbounded = name in ("cispo", "nll")
    assert math.isnan(loss) == unbounded and all(math.isnan(g) == unbounded for g in gradient)
    assert math.isnan(report.pop("actor/pg_loss")[0]) == unbounded
    assert all(math.isfinite(total) for total, _ in report.values())


@pytest.mark.parametrize("name", LOSSES)
def test_an_entropy_that_is_not_finite_stays_out_of_its_mean(name):
    columns = {"logprobs_T": [[-0.5, -0.5]], "old_logprobs_T": [[-0.5, -0.5]], "advantages_T": [[1.0, 1.0]]}
    loss, gradient, report = evaluate(responses(columns | {"entropy_T": [[INF, 0.25]]}), policy_loss=name)
    assert math.isfinite(loss) and all(map(math.isfinite, gradient)) and report["actor/entropy"] == (0.25, 1.0)


def test_the_edges_hold_for_a_loss_of_ones_own(monkeypatch):
    """A plug-in that knows nothing of them: probability 0 does not reach it, and its inf skips the step."""
    monkeypatch.setattr(losses.LOSSES, "known", dict(losses.LOSSES.known))
    losses.register_policy_loss("square")(lambda batch, options: (batch.logprobs_T**2, {}))
    columns = {"logprobs_T": [[-INF, -2.0]], "old_logprobs_T": [[-1.0, -1.0]], "advantages_T": [[1.0, 1.0]]}
    loss, gradient, _ = evaluate(responses(columns), policy_loss="square")
    assert loss == 4.0 and gradient == [0.0, -4.0]
    loss, gradient, _ = evaluate(responses({**columns, "logprobs_T": [[-1e200, -2.0]]}), policy_loss="square")
    assert math.isnan(loss) and all(map(math.isnan, gradient))


def test_a_batch_without_edges_is_untouched_to_the_bit():
    """The guard adds nothing to a healthy loss or its gradient."""
    batch = ragged_step().pack([0, 1, 2], LossOptions())
    batch = replace(batch, logprobs_T=batch.logprobs_T.detach().requires_grad_())
    loss, gradient, _ = evaluate(batch)
    loss_T, _ = losses.dapo(batch, LossOptions(**RECIPE))
    plain = torch.where(batch.mask_T, loss_T * batch.weights_T, 0.0).sum()
    (slopes,) = torch.autograd.grad(plain, batch.logprobs_T)
    assert loss == plain.item() and gradient == slopes.tolist()
