"""Policy losses: one pure function and one registry line each.

A loss maps the log-probs held here to a loss per token; masks, weights, the correction for the engine's
log-probs and the entropy bonus are applied once, for all losses, in ``policy_objective``.

At the edges all losses behave alike:

* A log ratio outside ± ``MAX_LOG_RATIO`` counts as the bound and has no gradient: a token's, the mean of a response in
  GSPO, the one to the reference policy in the KL term, the one to the engine in a correction. An infinite one is outside.
* A token that the policy, or the policy before the updates, gives probability 0 (log-prob -inf) is left out: value 0, no
  gradient, in no mean; the denominator still counts it, and ``actor/zero_prob`` says how many there are.
* NaN, a log-prob of +inf, an advantage or weight that is not finite, or a sum that overflows: the loss is NaN and so is the
  gradient of every token here, so that the norm of the whole gradient is NaN on every rank and the step is skipped.

So metrics are finite in every step that is taken.

Example:
    @register_policy_loss("reinforce")
    def reinforce(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
        return -batch.advantages_T * batch.logprobs_T, {}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.config import LossOptions
from megatron_dapo.plugins import Registry
from megatron_dapo.types import InputError

TensorSums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count), detached scalars on the device: nothing waits for them until the step is over.
The names depend on the options, never on the values: every rank and micro-batch has the same."""

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before exp; beyond it nothing has a gradient through its ratio."""

ICEPOP_RANGE = (0.5, 5.0)
"""Importance weights that icepop trusts, where --icepop-range does not say."""


@dataclass(frozen=True)
class TokenBatch:
    """The T response tokens held by this rank, packed, of S responses; every tensor is [T].

    ``logprobs_T`` and ``entropy_T`` (nats) carry the gradient. ``old_logprobs_T`` are those of the policy
    before the rollout step's updates, ``rollout_logprobs_T`` the engine's (NaN where it gave none),
    ``reference_logprobs_T`` those of the policy that the KL term stays close to.
    ``mask_T`` bool: in the loss. ``weights_T`` is the response's weight from ``sequence_loss_weights``,
    ``sequence_T`` int64 its number in 0 .. S-1. ``reduce`` sums a tensor over the ranks that hold other
    tokens of these responses (context parallel); all of them call it equally often, with tokens or without.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor | None
    entropy_T: Tensor | None
    advantages_T: Tensor
    mask_T: Tensor
    weights_T: Tensor
    sequence_T: Tensor
    num_sequences: int
    reference_logprobs_T: Tensor | None = None
    reduce: Callable[[Tensor], Tensor] = lambda x: x

    def __post_init__(self) -> None:
        assert self.mask_T.dtype == torch.bool and self.logprobs_T.dim() == 1, "mask is bool, columns are 1-D"
        for name, column in vars(self).items():
            fits = not isinstance(column, Tensor) or column.shape == self.logprobs_T.shape
            assert fits, f"{name} is {list(column.shape)}, logprobs_T {list(self.logprobs_T.shape)}"

    @property
    def ratio_T(self) -> Tensor:
        """pi / pi_old per token."""
        return _bounded_exp(_log_ratio(self.logprobs_T, self.old_logprobs_T))

    def sequence_mean(self, values_T: Tensor) -> Tensor:
        """Mean over the unmasked tokens of every response, on all ranks that hold some: [S], detached."""
        kept = torch.where(self.mask_T, values_T.detach(), 0.0)
        local = kept.new_zeros(2, self.num_sequences)
        local.index_add_(1, self.sequence_T, torch.stack([kept, self.mask_T.to(kept)]))
        sums_S, counts_S = self.reduce(local).unbind()
        mean_S: Tensor = sums_S / counts_S.clamp(min=1.0)
        return mean_S


PolicyLoss = Callable[[TokenBatch, LossOptions], tuple[Tensor, TensorSums]]
"""(batch, options) -> (loss [T]: unmasked, unweighted, before importance correction; metrics)."""

LOSSES = Registry[PolicyLoss]("--policy-loss", "loss")
register_policy_loss = LOSSES.register


def _log_ratio(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """log pi / other; 0, not NaN, where both probabilities are 0."""
    return torch.where(logprobs_T.isneginf() & other_T.isneginf(), 0.0, logprobs_T - other_T)


def _bounded_exp(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sum_and_count(values_T: Tensor, where_T: Tensor) -> tuple[Tensor, Tensor]:
    values = values_T.float() if values_T.dtype == torch.bool else values_T.detach()
    return torch.where(where_T, values, 0.0).sum(), where_T.to(values).sum()


def _clip_report(batch: TokenBatch, clipped_T: Tensor, dual_T: Tensor) -> TensorSums:
    return {
        "actor/pg_clipfrac": _sum_and_count(clipped_T, batch.mask_T),
        "actor/pg_clipfrac_lower": _sum_and_count(dual_T, batch.mask_T),
    }


def _decoupled_clip(ratio_T: Tensor, batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """The clipped surrogate of ratios [T], equation 10 with its minimum resolved: loss [T], clip shares.

    A > 0: -A min(r, 1 + eps_high). A < 0: -A min(max(r, 1 - eps_low), c), with c the dual clip, if any.
    """
    gain, loss = batch.advantages_T > 0, batch.advantages_T < 0
    low, high, dual = 1 - options.eps_clip, 1 + options.eps_clip_high, options.eps_clip_c or float("inf")
    bounded_T = torch.where(gain, ratio_T.clamp(max=high), ratio_T.clamp(low, dual))
    clipped_T = (gain & (ratio_T > high)) | (loss & (ratio_T < low))
    return -batch.advantages_T * bounded_T, _clip_report(batch, clipped_T, loss & (ratio_T > dual))


@register_policy_loss("dapo")
def dapo(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """Decoupled clip on token ratios (paper section 3.1)."""
    return _decoupled_clip(batch.ratio_T, batch, options)


@register_policy_loss("gspo")
def gspo(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """GSPO (arXiv 2507.18071, token form): one ratio per response, s = exp(mean of log pi / pi_old).

    A token's ratio is sg(s) pi / sg(pi): its value is s, its gradient s grad log pi, so a response is clipped
    as a whole, and the mean over its tokens has the gradient of the sequence objective. The clip has the same
    four sides; the authors' range is far narrower (3e-4 and 4e-4), their aggregation seq-mean-token-mean.
    """
    mean_S = batch.sequence_mean(_log_ratio(batch.logprobs_T, batch.old_logprobs_T))
    bounded_T = (mean_S.abs() > MAX_LOG_RATIO)[batch.sequence_T]
    one_T = torch.where(bounded_T, 0.0, batch.logprobs_T - batch.logprobs_T.detach()).exp()
    return _decoupled_clip(_bounded_exp(mean_S)[batch.sequence_T] * one_T, batch, options)


@register_policy_loss("cispo")
def cispo(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """CISPO (arXiv 2506.13585): -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: each token has a gradient.

    Both bounds hold for either sign of A. Its authors use the upper alone: ``eps_clip`` near 1 does that.
    """
    ratio_T = batch.ratio_T.detach()
    weight_T = ratio_T.clamp(1 - options.eps_clip, 1 + options.eps_clip_high)
    report = _clip_report(batch, weight_T != ratio_T, torch.zeros_like(batch.mask_T))
    return -weight_T * batch.advantages_T * batch.logprobs_T, report


@register_policy_loss("nll")
def nll(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """-log pi where the advantage is positive, else 0: next-token training on what was right."""
    return torch.where(batch.advantages_T > 0, -batch.logprobs_T, 0.0), {}


def rollout_correction(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor | None, mask_T: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, TensorSums]:
    """Importance weights for an engine whose distribution is not quite the trainer's.

    Returns weight [T] (detached), keep bool [T] (whether the token stays in the policy loss), and the size of
    the mismatch. Both sides are log-probs from before the updates: the weight never depends on the current
    policy. none: 1. tis: min(exp(old - rollout), C). icepop: exp(old - rollout) inside [low, high]; outside,
    the weight is 0 and the token is not kept, while the denominator still counts it: that stays the same on
    every rank, whatever the log-probs are.

    Raises:
        InputError: a correction is asked for and an unmasked token lacks the engine's log-prob (None or NaN).
    """
    kind, weight, keep = options.rollout_correction, torch.ones_like(old_logprobs_T), torch.ones_like(mask_T)
    corrects = kind in ("tis", "icepop")  # auto is settled before any loss is computed
    if rollout_logprobs_T is None:
        if corrects:
            raise InputError(_missing(kind, "all"))
        return weight, keep, {}
    known_T = mask_T & ~rollout_logprobs_T.isnan()
    if corrects and not torch.equal(known_T, mask_T):
        raise InputError(_missing(kind, str(int((mask_T & ~known_T).sum()))))
    gap_T = torch.where(known_T, _log_ratio(old_logprobs_T.detach(), rollout_logprobs_T.detach()), 0.0)
    gap_T = gap_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = gap_T.exp()
    # k3 of KL(rollout, old) under samples of the rollout: r - 1 - log r with r = old / rollout
    largest = torch.where(known_T, gap_T.abs(), 0.0).amax() if gap_T.numel() else gap_T.new_zeros(())
    report = {
        "mismatch/logprob_abs_diff": _sum_and_count(gap_T.abs(), known_T),
        "mismatch/logprob_abs_diff/max": (largest, known_T.any().to(largest)),
        "mismatch/ratio_below_half": _sum_and_count(ratio_T < 0.5, known_T),
        "mismatch/ratio_above_two": _sum_and_count(ratio_T > 2.0, known_T),
        "mismatch/k3": _sum_and_count(gap_T.expm1() - gap_T, known_T),
    }
    changed_T = ratio_T > options.tis_clip
    if kind == "tis":
        weight = ratio_T.clamp(max=options.tis_clip)
    elif kind == "icepop":
        low, high = options.icepop_range or ICEPOP_RANGE
        keep = ~((ratio_T < low) | (ratio_T > high))  # a NaN stays, to be seen
        weight, changed_T = torch.where(keep, ratio_T, 0.0), ~keep
    return weight, keep, {**report, "mismatch/tis_clipfrac": _sum_and_count(changed_T, known_T)}


def _missing(kind: str, how_many: str) -> str:
    return (
        f"--rollout-correction {kind} needs the engine's log-prob of every response token, and {how_many} "
        "are missing; return log-probs from the engine, or use --rollout-correction none"
    )


def policy_objective(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """Sum over the unmasked tokens here of (correction · loss - entropy_coef · entropy + kl_coef · k3) · weight; metrics.

    Divided by the unmasked tokens of the whole optimizer step it is the step's loss. What stands in masked
    places, NaN and inf included, reaches neither the sum nor a gradient: it is replaced before a loss sees it
    (0 · inf, in a product or in its gradient, would be NaN) and left out of the sum afterwards.

    Raises:
        InputError: ``policy_loss`` is unknown, or a correction lacks the engine's log-probs.
    """
    impossible_T = batch.mask_T & (batch.logprobs_T.isneginf() | batch.old_logprobs_T.isneginf())
    safe = _without_masked(replace(batch, mask_T=batch.mask_T & ~impossible_T))
    loss_T, report = LOSSES[options.policy_loss](safe, options)
    weight_T, keep_T, mismatch = rollout_correction(
        batch.old_logprobs_T, batch.rollout_logprobs_T, batch.mask_T, options
    )
    policy = loss = torch.where(safe.mask_T & keep_T, weight_T * loss_T * safe.weights_T, 0.0).sum()
    log_ratio_T = (safe.logprobs_T.detach() - safe.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    report |= {
        "actor/ppo_kl": _sum_and_count(-log_ratio_T, safe.mask_T),
        "actor/ratio_mean": _sum_and_count(safe.ratio_T, safe.mask_T),
        "actor/zero_prob": _sum_and_count(impossible_T, batch.mask_T),
    }
    if safe.entropy_T is not None:
        report["actor/entropy"] = _sum_and_count(safe.entropy_T, safe.mask_T & safe.entropy_T.isfinite())
        if options.entropy_coef:
            bonus_T = torch.where(safe.mask_T, safe.entropy_T * safe.weights_T, 0.0)
            loss = loss - options.entropy_coef * bonus_T.sum()
    assert safe.entropy_T is not None or not options.entropy_coef, "an entropy bonus needs entropies"
    if options.kl_coef:
        assert safe.reference_logprobs_T is not None, "a KL term needs the reference policy's log-probs"
        kl_T = k3(safe.logprobs_T, safe.reference_logprobs_T)
        loss = loss + options.kl_coef * torch.where(safe.mask_T, kl_T * safe.weights_T, 0.0).sum()
        report["actor/kl_loss"] = _sum_and_count(kl_T, safe.mask_T)
    loss = _nan_unless_defined(loss, safe)
    report["actor/pg_loss"] = (torch.where(loss.isnan(), loss, policy).detach(), batch.mask_T.to(loss).sum())
    return loss, report | mismatch


def _nan_unless_defined(loss: Tensor, batch: TokenBatch) -> Tensor:
    """``loss``; where it is not finite, or stands on what is not, NaN with a gradient of NaN: a clip or a product with 0 can
    hide what is undefined from the one and not from the other, and the step is skipped by its gradient."""
    defined = loss.isfinite()
    for column_T in (batch.logprobs_T, batch.old_logprobs_T, batch.advantages_T, batch.weights_T):
        defined = defined & column_T.isfinite().all()
    nothing_T = batch.logprobs_T * torch.where(defined, 0.0, torch.nan).to(loss)
    return loss + nothing_T.sum()


def k3(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Estimate of KL(pi, reference) per token, r - 1 - log r with r = reference / pi: never negative, unbiased under samples
    of pi (Schulman, "Approximating KL divergence", 2020; GRPO eq. 4)."""
    log_ratio_T = _log_ratio(reference_logprobs_T, logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_T.expm1() - log_ratio_T


def _without_masked(batch: TokenBatch) -> TokenBatch:
    """The batch with 0 in every masked place of every real column."""
    columns: dict[str, Any] = {
        name: torch.where(batch.mask_T, column, 0.0)
        for name, column in vars(batch).items()
        if isinstance(column, Tensor) and column.is_floating_point()
    }
    return replace(batch, **columns)
