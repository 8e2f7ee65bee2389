"""The whole objective against the paper's equation written out a token at a time, and cut up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from token_batches import Step, one_token, ragged_step

from megatron_dapo.algorithm.losses import TokenBatch, policy_objective
from megatron_dapo.config import LossOptions

MODES = ("token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ALL = list(range(7))


def literal_token(step: Step, row: int, advantage: float, options: LossOptions) -> torch.Tensor:
    """-min(r A, clip(r) A), dual clip and corrections as in their papers, entropy by its definition."""
    logp = step.logits[row].log_softmax(-1)
    r = (logp[step.targets[row]] - step.old_logprobs[row]).exp()
    clipped = torch.clamp(r, 1 - options.eps_clip, 1 + options.eps_clip_high)
    surrogate = torch.minimum(r * advantage, clipped * advantage)
    if options.eps_clip_c is not None and advantage < 0:
        surrogate = surrogate.clamp(min=options.eps_clip_c * advantage)
    w = math.exp(step.old_logprobs[row] - step.rollout_logprobs[row])
    if options.rollout_correction == "tis":
        surrogate = surrogate * min(w, options.tis_clip)
    if options.rollout_correction == "icepop":
        low, high = options.icepop_range
        surrogate = surrogate * (w if low <= w <= high else 0.0)
    return -surrogate + options.entropy_coef * (logp.exp() * logp).sum()


def literal_objective(step: Step, options: LossOptions) -> torch.Tensor:
    """The step's loss by the mode's definition."""
    tokens = [
        [literal_token(step, t, step.advantages[i], options) for t, m in zip(step.rows(i), mask, strict=True) if m]
        for i, mask in enumerate(step.mask)
    ]
    live = [torch.stack(x) for x in tokens if x]
    if options.loss_agg_mode == "token-mean":
        return torch.cat(live).mean()
    if options.loss_agg_mode == "prompt-mean":
        prompts = [[x for g, row in zip(step.group, tokens, strict=True) if g == p for x in row] for p in (0, 1, 2)]
        return torch.stack([torch.stack(x).mean() for x in prompts if x]).mean()
    if options.loss_agg_mode == "seq-mean-token-mean":
        return torch.stack([x.mean() for x in live]).mean()
    return torch.stack([x.sum() / step.max_response_len for x in live]).mean()


def loss_and_gradient(step: Step, options: LossOptions, microbatches: list[list[int]]):
    """What Megatron makes of the sums: added over micro-batches, divided once by the tokens of the step."""
    total = sum(policy_objective(step.pack(rows, options), options)[0] for rows in microbatches)
    loss = total / step.num_tokens
    return loss.item(), torch.autograd.grad(loss, step.logits)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"eps_clip_c": 1.5},
        {"entropy_coef": 0.3},
        {"rollout_correction": "tis", "tis_clip": 1.2},
        {"rollout_correction": "icepop", "icepop_range": [0.8, 1.4], "entropy_coef": 0.1},
    ],
    ids=["paper", "dual-clip", "entropy", "tis", "icepop"],
)
def test_the_equation_and_its_gradient(mode, extra):
    step = ragged_step()
    options = LossOptions(loss_agg_mode=mode, **extra)
    expected = literal_objective(step, options)
    (slope,) = torch.autograd.grad(expected, step.logits)
    for microbatches in ([ALL], [[0, 1, 2], [3, 4], [5, 6]], [[6, 2], [4], [0, 5], [1, 3]]):
        loss, gradient = loss_and_gradient(step, options, microbatches)
        assert loss == pytest.approx(expected.item(), abs=1e-12)
        assert torch.allclose(gradient, slope, atol=1e-12, rtol=1e-10)
    masked = torch.tensor([not m for mask in step.mask for m in mask])
    assert (slope[masked] == 0).all() and (slope[~masked] != 0).any()


def test_the_step_of_these_tests_is_clipped_on_every_side():
    step, options = ragged_step(), LossOptions(eps_clip_c=1.5)
    batch = step.pack(ALL, options)
    ratio, gain = batch.ratio_T[batch.mask_T], batch.advantages_T[batch.mask_T] > 0
    for side in (ratio > 1.28, ratio < 0.8):
        assert (side & gain).any() and (side & ~gain).any()
    assert ((ratio > 1.5) & ~gain).any()
    _, report = policy_objective(batch, options)
    cut = (gain & (ratio > 1.28)) | (~gain & (ratio < 0.8))
    assert report["actor/pg_clipfrac"] == (cut.sum(), step.num_tokens)
    assert report["actor/pg_clipfrac_lower"] == ((~gain & (ratio > 1.5)).sum(), step.num_tokens)


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("mode", MODES)
def test_the_first_update_is_the_plain_policy_gradient(name, mode):
    """Before the policy has moved every ratio is 1, and the gradient that of -A log pi."""
    step = ragged_step(drift=0.0)
    options = LossOptions(policy_loss=name, loss_agg_mode=mode)
    batch = step.pack(ALL, options)
    plain = torch.where(batch.mask_T, -batch.advantages_T * batch.logprobs_T * batch.weights_T, 0.0).sum()
    (expected,) = torch.autograd.grad(plain, step.logits)
    loss, report = policy_objective(step.pack(ALL, options), options)
    (gradient,) = torch.autograd.grad(loss, step.logits)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert report["actor/ratio_mean"][0].item() / report["actor/ratio_mean"][1].item() == pytest.approx(1.0)
    assert report["actor/ppo_kl"][0].item() == pytest.approx(0.0, abs=1e-12)
    assert report["actor/pg_clipfrac"][0].item() == 0


def constant_losses(lengths: list[int], values: list[float], mask: list[bool], mode: str = "token-mean"):
    """(step, options) whose unmasked tokens have these losses, by negative log-likelihood."""
    target = torch.zeros(sum(lengths), dtype=torch.long)
    chosen = torch.cat([torch.full((n,), -v, dtype=torch.float64) for n, v in zip(lengths, values, strict=True)])
    rest = torch.log1p(-chosen.exp())
    logits = torch.stack([chosen, rest], dim=-1).requires_grad_()
    masks = [[m] * n for n, m in zip(lengths, mask, strict=True)]
    group = list(range(len(lengths)))
    step = Step(lengths, group, masks, [1.0] * len(lengths), logits, target, chosen, chosen)
    return step, LossOptions(policy_loss="nll", loss_agg_mode=mode)


@pytest.mark.parametrize("microbatches", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_gradient_accumulation_is_the_full_batch(microbatches):
    """verl#906: 2 tokens of loss 1 and 8 of loss 3 are 26 over 10, however they are cut."""
    step, options = constant_losses([2, 8], [1.0, 3.0], [True, True])
    loss, gradient = loss_and_gradient(step, options, microbatches)
    assert loss == pytest.approx(2.6)
    assert torch.allclose(gradient, loss_and_gradient(step, options, [[0, 1]])[1])


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", (1 + 4 + 15) / 8), ("seq-mean-token-mean", (1 + 2 + 3) / 3)]
)
def test_a_masked_response_leaves_both_sides_of_the_fraction(mode, expected):
    """trl#6369: of four responses the one cut off is neither in the sum nor in the count."""
    step, options = constant_losses([1, 2, 9, 5], [1.0, 2.0, 7.0, 3.0], [True, True, False, True], mode)
    assert loss_and_gradient(step, options, [[0, 1, 2, 3]])[0] == pytest.approx(expected)
    assert loss_and_gradient(step, options, [[2], [0, 3], [1]])[0] == pytest.approx(expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "nll"])
@pytest.mark.parametrize("correction", ["none", "tis", "icepop"])
def test_masked_places_may_hold_anything(name, correction, poison):
    options = LossOptions(policy_loss=name, rollout_correction=correction, entropy_coef=0.1, eps_clip_c=3.0)
    clean = ragged_step().pack(ALL, options)
    columns = {
        key: value.detach().clone()
        for key, value in vars(clean).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    trained = ("logprobs_T", "entropy_T")

    def run(columns: dict[str, torch.Tensor]):
        leaves = {key: value.requires_grad_(key in trained) for key, value in columns.items()}
        loss, report = policy_objective(replace(clean, **leaves), options)
        return loss, report, torch.autograd.grad(loss, [leaves[key] for key in trained], allow_unused=True)

    poisoned = {key: torch.where(clean.mask_T, value, poison) for key, value in columns.items()}
    loss, report, gradients = run(columns)
    loss_again, report_again, gradients_again = run(poisoned)
    assert loss.isfinite() and loss_again == loss
    assert report_again == report
    for gradient, again in zip(gradients, gradients_again, strict=True):
        assert (again == gradient).all() and (again[~clean.mask_T] == 0).all()


def test_nan_in_the_loss_is_not_hidden():
    for column in ("logprobs_T", "old_logprobs_T", "advantages_T"):
        batch = one_token(-1.0, rollout_logprobs_T=-1.0)
        poisoned = replace(batch, **{column: torch.tensor([float("nan")], dtype=torch.float64)})
        for correction in ("none", "tis", "icepop"):
            assert policy_objective(poisoned, LossOptions(rollout_correction=correction))[0].isnan()


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "nll"])
@pytest.mark.parametrize("correction", ["none", "tis", "icepop"])
def test_a_rank_without_tokens_has_the_same_metrics_and_a_gradient(name, correction):
    """Under context parallelism a rank may hold prompt tokens alone: it still joins the backward pass."""
    options = LossOptions(policy_loss=name, rollout_correction=correction)
    full = ragged_step().pack(ALL, options)
    nothing = {key: value[:0] for key, value in vars(full).items() if isinstance(value, torch.Tensor)}
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    loss, report = policy_objective(TokenBatch(**{**nothing, "logprobs_T": logprobs}, num_sequences=2), options)
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None
    _, expected = policy_objective(full, options)
    assert list(report) == list(expected)
    assert all(value.item() == 0 and count.item() == 0 for value, count in report.values())


def test_metrics_are_detached_sums_and_counts_that_add_up():
    step = ragged_step()
    options = LossOptions(rollout_correction="tis")
    _, whole = policy_objective(step.pack(ALL, options), options)
    _, first = policy_objective(step.pack([2, 3, 0], options), options)
    _, second = policy_objective(step.pack([1, 4, 5, 6], options), options)
    assert set(whole) == {
        "actor/pg_loss", "actor/entropy", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/zero_prob",
        "actor/ratio_mean", "mismatch/logprob_abs_diff", "mismatch/k3", "mismatch/tis_clipfrac",
        "mismatch/logprob_abs_diff/max", "mismatch/ratio_below_half", "mismatch/ratio_above_two",
    }  # fmt: skip
    for name, pair in whole.items():
        if name.endswith("/max"):
            assert pair[0].item() == max(first[name][0].item(), second[name][0].item()) and pair[1].item() == 1
            continue
        for total, a, b in zip(pair, first[name], second[name], strict=True):
            assert total.dim() == 0 and not total.requires_grad
            assert total.item() == pytest.approx(a.item() + b.item(), abs=1e-9), name
        assert pair[1].item() == step.num_tokens
    batch = step.pack(ALL, options)
    mean = {name: value.item() / count.item() for name, (value, count) in whole.items()}
    drift = (batch.logprobs_T - batch.old_logprobs_T)[batch.mask_T]
    assert mean["actor/ppo_kl"] == pytest.approx(-drift.mean().item())
    assert mean["actor/ratio_mean"] == pytest.approx(drift.exp().mean().item())
    assert mean["actor/entropy"] == pytest.approx(batch.entropy_T[batch.mask_T].mean().item())
    assert mean["actor/pg_loss"] == pytest.approx(literal_objective(step, options).item())


def test_the_entropy_is_not_touched_unless_asked_for():
    token = one_token(-1.0, entropy_T=float("inf"))
    assert policy_objective(token, LossOptions())[0].isfinite()
    with pytest.raises(AssertionError, match="entropies"):
        policy_objective(one_token(-1.0), LossOptions(entropy_coef=0.1))
