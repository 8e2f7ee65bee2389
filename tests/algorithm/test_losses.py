"""Each policy loss a token at a time, the registry, and the correction for the engine's log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from token_batches import one_token, ragged_step

from megatron_dapo.algorithm import losses
from megatron_dapo.algorithm.losses import (
    LOSSES,
    TokenBatch,
    policy_objective,
    register_policy_loss,
    rollout_correction,
)
from megatron_dapo.config import LossOptions
from megatron_dapo.types import InputError

RECIPE = LossOptions(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=10.0)
PAPER = LossOptions(eps_clip=0.2, eps_clip_high=0.28)


def loss_and_slope(name, ratio, advantage, options):
    """(loss, d loss / d ratio, metrics) of one token, by autograd through log pi = log(ratio), pi_old = 1."""
    r = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    loss, report = LOSSES[name](one_token(r.log(), advantages_T=advantage), options)
    loss.sum().backward()
    return (
        loss.item(),
        r.grad.item(),
        {key: value.item() / count.item() for key, (value, count) in report.items()},
    )


@pytest.mark.parametrize(
    ("ratio", "gain", "loss"),
    [
        (0.5, (-0.5, -1), (0.8, 0)),
        (0.79, (-0.79, -1), (0.8, 0)),
        (1.0, (-1.0, -1), (1.0, 1)),
        (1.27, (-1.27, -1), (1.27, 1)),
        (1.5, (-1.28, 0), (1.5, 1)),
        (5.0, (-1.28, 0), (5, 1)),
        (20.0, (-1.28, 0), (10, 0)),
    ],
)
def test_decoupled_clip(ratio, gain, loss):
    value, slope, report = loss_and_slope("dapo", ratio, 1.0, RECIPE)
    assert (value, slope) == (pytest.approx(gain[0]), pytest.approx(gain[1]))
    assert report == {"actor/pg_clipfrac": float(ratio > 1.28), "actor/pg_clipfrac_lower": 0.0}
    value, slope, report = loss_and_slope("dapo", ratio, -1.0, RECIPE)
    assert (value, slope) == (pytest.approx(loss[0]), pytest.approx(loss[1]))
    assert report == {"actor/pg_clipfrac": float(ratio < 0.8), "actor/pg_clipfrac_lower": float(ratio > 10)}


def test_without_a_dual_clip_a_negative_advantage_has_no_cap():
    assert loss_and_slope("dapo", 20.0, -1.0, PAPER)[:2] == (pytest.approx(20), pytest.approx(1))


@pytest.mark.parametrize("ratio", [0.1, 1.0, 30.0])
def test_no_advantage_no_loss(ratio):
    value, slope, report = loss_and_slope("dapo", ratio, 0.0, RECIPE)
    assert value == 0 and slope == 0 and set(report.values()) == {0.0}


@pytest.mark.parametrize("log_ratio", [-5000.0, 5000.0])
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_absurd_ratios_stay_finite(name, log_ratio, advantage):
    logprob = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    loss, report = policy_objective(one_token(logprob, advantages_T=advantage), LossOptions(policy_loss=name))
    loss.backward()
    assert loss.isfinite() and logprob.grad.isfinite()
    assert all(value.isfinite() for value, _ in report.values())


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (5.0, 1.28)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_weighs_the_log_prob(ratio, weight, advantage):
    value, slope, report = loss_and_slope("cispo", ratio, advantage, PAPER)
    assert value == pytest.approx(-weight * advantage * math.log(ratio))
    assert slope == pytest.approx(-weight * advantage / ratio)
    assert report["actor/pg_clipfrac"] == float(weight != ratio)


def test_cispo_with_the_upper_bound_alone():
    options = LossOptions(eps_clip=0.999, eps_clip_high=0.28)
    assert loss_and_slope("cispo", 0.01, 1.0, options)[1] == pytest.approx(-1.0)


@pytest.mark.parametrize(("advantage", "slope"), [(0.3, -2.0), (0.0, 0.0), (-1.0, 0.0)])
def test_nll_learns_what_was_right(advantage, slope):
    value, gradient, report = loss_and_slope("nll", 0.5, advantage, PAPER)
    assert value == pytest.approx(math.log(2) if advantage > 0 else 0) and gradient == pytest.approx(slope)
    assert report == {}


def gspo_literal(step, options):
    """The GSPO paper's objective: the mean of min(s A, clip(s) A), s the geometric mean of ratios."""
    terms = []
    for i, mask in enumerate(step.mask):
        if any(mask):
            batch = step.pack([i], options)
            kept = torch.tensor(mask)
            s = (batch.logprobs_T - batch.old_logprobs_T)[kept].mean().exp()
            clipped = s.clamp(1 - options.eps_clip, 1 + options.eps_clip_high)
            terms.append(-torch.minimum(s * step.advantages[i], clipped * step.advantages[i]))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("clip", [0.02, 0.9])
def test_gspo_is_the_sequence_objective(clip):
    step = ragged_step()
    options = LossOptions(policy_loss="gspo", loss_agg_mode="seq-mean-token-mean", eps_clip=clip, eps_clip_high=clip)
    expected = gspo_literal(step, options)
    (slope,) = torch.autograd.grad(expected, step.logits)
    loss, report = policy_objective(step.pack(list(range(7)), options), options)
    (gradient,) = torch.autograd.grad(loss / step.num_tokens, step.logits)
    assert loss.item() / step.num_tokens == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(gradient, slope, atol=1e-12)
    share = report["actor/pg_clipfrac"][0].item()
    assert (share > 0) == (clip < 0.1) and (gradient != 0).any()


def test_a_mean_over_a_response_is_that_of_its_unmasked_tokens():
    batch = ragged_step().pack([2, 3, 0], LossOptions())
    values = torch.arange(16.0, dtype=torch.float64)
    kept = [0, 1, 2, 3, 6, 7, 8]
    assert batch.sequence_mean(values).tolist() == pytest.approx([sum(kept) / 7, 0.0, 14.0])


@pytest.mark.parametrize("cut", [[0], [1, 4, 6], list(range(9))])
def test_gspo_over_context_parallel_ranks(cut):
    """Two ranks hold tokens of the same response, or one holds none: the gradients are those of one rank."""
    step = ragged_step()
    options = LossOptions(policy_loss="gspo", loss_agg_mode="seq-mean-token-mean")
    whole = step.pack([2], options)
    loss, _ = policy_objective(whole, options)
    (expected,) = torch.autograd.grad(loss, step.logits)

    there = torch.zeros(9, dtype=torch.bool)
    there[cut] = True
    sums: list[torch.Tensor] = []

    def run(exchange):
        parts = []
        for mine in (there, ~there):
            batch = step.pack([2], options)
            columns = {name: value[mine] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
            parts.append(policy_objective(TokenBatch(num_sequences=1, reduce=exchange, **columns), options)[0])
        return sum(parts)

    run(lambda x: sums.append(x.clone()) or x)
    assert len(sums) == 2, "one exchange a rank, with or without tokens"
    total = run(lambda x: sums[0] + sums[1])
    (gradient,) = torch.autograd.grad(total, step.logits)
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_registering_a_loss_is_one_function(monkeypatch):
    monkeypatch.setattr(losses.LOSSES, "known", dict(losses.LOSSES.known))

    @register_policy_loss("reinforce")
    def reinforce(batch, options):
        return -batch.advantages_T * batch.logprobs_T, {}

    token = one_token(-2.0, advantages_T=3.0, weights_T=0.5)
    assert policy_objective(token, LossOptions(policy_loss="reinforce"))[0].item() == 3.0
    with pytest.raises(AssertionError, match="twice"):
        register_policy_loss("reinforce")(reinforce)


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (0.7, 1.0), (-0.7, 0.5), (30.0, 1.0)])
def test_the_kl_term_is_k3_and_its_gradient(gap, weight):
    """r - 1 - log r with r = reference / pi, so the gradient is 1 - r; it has the weight of its response."""
    logprob = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    token = one_token(logprob, advantages_T=0.0, weights_T=weight, reference_logprobs_T=gap - 1.0)
    loss, report = policy_objective(token, LossOptions(kl_coef=0.25))
    loss.backward()
    bounded = min(gap, 20.0)
    assert loss.item() == pytest.approx(0.25 * weight * (math.exp(bounded) - 1 - bounded), rel=1e-12, abs=1e-15)
    expected = 0.25 * weight * (1 - math.exp(gap)) if gap <= 20 else 0.0
    assert logprob.grad.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert report["actor/kl_loss"][0].item() == pytest.approx(math.exp(bounded) - 1 - bounded)


def test_a_kl_term_without_a_reference_is_refused():
    with pytest.raises(AssertionError, match="reference"):
        policy_objective(one_token(-1.0), LossOptions(kl_coef=0.1))


def test_a_loss_of_the_users_own_module(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("def plain(batch, options):\n    return -2.0 * batch.logprobs_T, {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loss, _ = policy_objective(one_token(-2.0), LossOptions(policy_loss="my_losses:plain"))
    assert loss.item() == 4.0
    for path, reason in (
        ("my_losses:absent", "'my_losses' has no function 'absent'"),
        ("no_such_module:f", r"cannot import 'no_such_module' \(ModuleNotFoundError: .*\); is it on PYTHONPATH\?"),
    ):
        with pytest.raises(InputError, match=f"^--policy-loss {path}: {reason}$"):
            LOSSES[path]


@pytest.mark.parametrize(("name", "near"), [("gpso", "gspo"), ("DAPO", "dapo"), ("zzz", "")])
def test_an_unknown_loss_names_the_nearest(name, near):
    with pytest.raises(InputError, match=f"--policy-loss {name}: .*{near}.*") as caught:
        LOSSES[name]
    assert "\n" not in str(caught.value) and "dapo" in str(caught.value)


def test_columns_that_do_not_fit_are_refused():
    """Broadcasting would make [T, T] of [T] and [T, 1]."""
    batch = ragged_step().pack([0], LossOptions())
    with pytest.raises(AssertionError, match="advantages_T"):
        TokenBatch(**{**vars(batch), "advantages_T": batch.advantages_T[:, None]})
    with pytest.raises(AssertionError, match="mask"):
        TokenBatch(**{**vars(batch), "mask_T": batch.mask_T.double()})


# --- the engine's log-probs against the trainer's ---

OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
RATIO = torch.tensor([0.2, 1.0, 3.0, 8.0], dtype=torch.float64)
ROLLOUT = OLD - RATIO.log()
ALL = torch.ones(4, dtype=torch.bool)


def shares(report):
    return {name: value.item() / count.item() for name, (value, count) in report.items()}


def test_no_correction_weighs_one_and_measures():
    weight, keep, report = rollout_correction(OLD, ROLLOUT, ALL, LossOptions())
    assert weight.tolist() == [1.0] * 4 and keep.all()
    measured = shares(report)
    assert measured["mismatch/logprob_abs_diff"] == pytest.approx(RATIO.log().abs().mean().item())
    assert measured["mismatch/k3"] == pytest.approx((RATIO - 1 - RATIO.log()).mean().item())
    assert measured["mismatch/tis_clipfrac"] == 0.5
    assert rollout_correction(OLD, None, ALL, LossOptions())[2] == {}


def test_tis_caps_the_weight():
    options = LossOptions(rollout_correction="tis", tis_clip=2.0)
    weight, keep, report = rollout_correction(OLD.clone().requires_grad_(), ROLLOUT, ALL, options)
    assert weight.tolist() == pytest.approx([0.2, 1.0, 2.0, 2.0]) and keep.all()
    assert not weight.requires_grad
    assert shares(report)["mismatch/tis_clipfrac"] == 0.5


@pytest.mark.parametrize(("bounds", "expected"), [(None, [0.0, 1.0, 3.0, 0.0]), ([0.1, 2.0], [0.2, 1.0, 0.0, 0.0])])
def test_icepop_drops_what_it_does_not_trust(bounds, expected):
    options = LossOptions(rollout_correction="icepop", icepop_range=bounds)
    weight, keep, report = rollout_correction(OLD, ROLLOUT, ALL, options)
    assert weight.tolist() == pytest.approx(expected) and keep.tolist() == [w > 0 for w in expected]
    assert shares(report)["mismatch/tis_clipfrac"] == 0.5


def test_icepop_leaves_the_denominator_alone():
    token = one_token(-1.0, rollout_logprobs_T=-9.0)
    loss, report = policy_objective(token, LossOptions(rollout_correction="icepop"))
    assert loss.item() == 0 and report["actor/pg_loss"][1].item() == 1


@pytest.mark.parametrize("correction", ["tis", "icepop"])
@pytest.mark.parametrize("missing", [None, torch.tensor([-1.0, float("nan"), -1.0, -1.0])])
def test_missing_log_probs_fail_loudly(correction, missing):
    options = LossOptions(rollout_correction=correction)
    with pytest.raises(InputError, match=f"--rollout-correction {correction} .* missing"):
        rollout_correction(OLD, missing, ALL, options)
    if missing is not None:
        masked = torch.tensor([True, False, True, True])
        assert rollout_correction(OLD, missing.double(), masked, options)[0][masked].isfinite().all()
        measured = rollout_correction(OLD, missing.double(), ALL, LossOptions())[2]
        assert measured["mismatch/k3"][1].item() == 3, "what is missing is not measured"


def test_the_weight_does_not_follow_the_current_policy():
    """slime#179: a token's weight is that of the policy before the updates, learning rate 0 or not."""
    options = LossOptions(policy_loss="nll", rollout_correction="tis")
    weights = [
        policy_objective(one_token(now, old_logprobs_T=-1.0, rollout_logprobs_T=-1.4), options)[0].item() / -now
        for now in (-1.0, -0.2, -3.0)
    ]
    assert weights == pytest.approx([math.exp(0.4)] * 3)


def test_k3_estimates_the_divergence_of_what_was_sampled():
    """Its expectation under the engine's distribution is KL(rollout, old)."""
    draws = torch.Generator().manual_seed(0)
    rollout, old = torch.randn(2, 6, generator=draws, dtype=torch.float64).log_softmax(-1)
    one = torch.tensor([True])
    expectation = sum(
        rollout[v].exp()
        * rollout_correction(old[v : v + 1], rollout[v : v + 1], one, LossOptions())[2]["mismatch/k3"][0]
        for v in range(6)
    )
    assert expectation.item() == pytest.approx((rollout.exp() * (rollout - old)).sum().item())
