"""Policy losses: one pure function and one registry line each.

A loss maps log-probs of the tokens held here to a loss a token; weights, masks, corrections for the engine's log-probs
and the entropy bonus are applied once, for all of them, in ``policy_objective``.

Example:
    @register_policy_loss("mine")
    def mine(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
        return -batch.advantages_T * batch.logprobs_T, {}
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dapo.config import LossOptions
from megatron_dapo.types import InputError

TensorSums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count) as detached scalars, so that reading them waits until the step is over."""

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before exp."""


@dataclass(frozen=True)
class TokenBatch:
    """Response tokens held by this rank, packed: T of S responses.

    ``logprobs_T`` carries the gradient, as ``entropy_T`` does; ``old_logprobs_T`` are those of the policy before the
    updates, ``rollout_logprobs_T`` the engine's (None or NaN where it gave none); ``weights_T`` the response's aggregation
    weight; ``sequence_T`` its number 0 .. ``num_sequences``-1. ``reduce`` sums a tensor of per-response sums [S] over ranks
    that hold other tokens of the same responses, differentiably; alone, it is the identity.
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
    reduce: Callable[[Tensor], Tensor] = lambda x: x

    @property
    def log_ratio_T(self) -> Tensor:
        """log(pi / pi_old), clamped."""
        return (self.logprobs_T - self.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values_T: Tensor) -> Tensor:
        """Mean over the unmasked tokens of every response, spread back over its tokens: [T]."""
        kept = torch.where(self.mask_T, values_T, 0.0)
        zeros = kept.new_zeros(self.num_sequences)
        sums = self.reduce(zeros.index_add(0, self.sequence_T, kept))
        counts = self.reduce(zeros.index_add(0, self.sequence_T, self.mask_T.to(kept)))
        return (sums / counts.clamp(min=1.0)).index_select(0, self.sequence_T)


PolicyLoss = Callable[[TokenBatch, LossOptions], tuple[Tensor, TensorSums]]
_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Make a loss known as ``--policy-loss name``."""

    def add(loss: PolicyLoss) -> PolicyLoss:
        _LOSSES[name] = loss
        return loss

    return add


def policy_loss_by_name(name: str) -> PolicyLoss:
    """The loss registered under ``name``.

    Raises:
        InputError: no such loss; the message names the nearest.
    """
    if name not in _LOSSES:
        close = difflib.get_close_matches(name, _LOSSES, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(_LOSSES))}"
        raise InputError(f"--policy-loss {name}: unknown ({hint})")
    return _LOSSES[name]


def decoupled_clip(ratio_T: Tensor, advantages_T: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The four-sided clipped surrogate (paper equation 8 with its minimum resolved): loss, where clipped, where dual-clipped.

    A > 0: -A min(r, 1 + eps_high). A < 0: -A min(max(r, 1 - eps_low), c), with c the dual clip, if any.
    """
    up = advantages_T > 0
    down = advantages_T < 0
    bounded = torch.where(
        up, ratio_T.clamp(max=1 + options.eps_clip_high), ratio_T.clamp(min=1 - options.eps_clip)
    )
    clipped = (up & (ratio_T > 1 + options.eps_clip_high)) | (down & (ratio_T < 1 - options.eps_clip))
    dual = torch.zeros_like(clipped)
    if options.eps_clip_c is not None:
        dual = down & (ratio_T > options.eps_clip_c)
        bounded = torch.where(down, bounded.clamp(max=options.eps_clip_c), bounded)
    return -advantages_T * bounded, clipped, dual


def _clip_report(batch: TokenBatch, clipped: Tensor, dual: Tensor) -> TensorSums:
    return {
        "actor/pg_clipfrac": _masked_sum(batch, clipped.float()),
        "actor/pg_clipfrac_lower": _masked_sum(batch, dual.float()),
    }


@register_policy_loss("dapo")
def dapo(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """Decoupled clip on token ratios (paper sections 3.1 and 3.3)."""
    loss, clipped, dual = decoupled_clip(batch.log_ratio_T.exp(), batch.advantages_T, options)
    return loss, _clip_report(batch, clipped, dual)


@register_policy_loss("gspo")
def gspo(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """GSPO (arXiv 2507.18071): one ratio a response, the geometric mean of its token ratios, clipped as a whole."""
    ratio = batch.sequence_mean(batch.log_ratio_T).exp()
    loss, clipped, dual = decoupled_clip(ratio, batch.advantages_T, options)
    return loss, _clip_report(batch, clipped, dual)


@register_policy_loss("cispo")
def cispo(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """CISPO (arXiv 2506.13585): the clipped ratio is a constant weight on A log pi, so no token loses its gradient."""
    ratio = batch.log_ratio_T.detach().exp()
    weight = ratio.clamp(1 - options.eps_clip, 1 + options.eps_clip_high)
    return -weight * batch.advantages_T * batch.logprobs_T, _clip_report(
        batch, weight != ratio, torch.zeros_like(batch.mask_T)
    )


@register_policy_loss("nll")
def nll(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """Negative log-likelihood of the responses with a positive advantage: next-token training on what was right."""
    return torch.where(batch.advantages_T > 0, -batch.logprobs_T, 0.0), {}


def rollout_correction(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor | None, mask_T: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, TensorSums]:
    """Weight of a token for the engine's distribution not being the trainer's: weight [T] (detached), kept [T], metrics.

    The old policy is compared, never the current one. tis: min(exp(old - rollout), C). icepop: the weight where it lies in
    [low, high], else the token leaves the loss (the denominator still counts it, so that it is the same on every rank).

    Raises:
        ValueError: a correction is asked for and a log-prob of the engine is missing.
    """
    one, kept = torch.ones_like(old_logprobs_T), torch.ones_like(mask_T)
    missing = rollout_logprobs_T is None or bool(rollout_logprobs_T[mask_T].isnan().any())
    if options.rollout_correction == "none" and missing:
        return one, kept, {}
    if rollout_logprobs_T is None or missing:
        raise ValueError(f"--rollout-correction {options.rollout_correction} needs the engine's log-probs; some are missing")
    gap = torch.where(mask_T, (old_logprobs_T - rollout_logprobs_T).detach(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, count = gap.exp(), mask_T.sum()
    report = {
        "mismatch/logprob_abs_diff": (gap.abs().sum(), count),
        "mismatch/k3": (torch.where(mask_T, (-gap).exp() - 1 + gap, 0.0).sum(), count),
    }
    if options.rollout_correction == "tis":
        report["mismatch/tis_clipfrac"] = ((mask_T & (ratio > options.tis_clip)).sum(), count)
        return ratio.clamp(max=options.tis_clip), kept, report
    if options.rollout_correction == "icepop":
        low, high = options.icepop_range or (0.5, 5.0)
        kept = (ratio >= low) & (ratio <= high)
        report["mismatch/icepop_masked"] = ((mask_T & ~kept).sum(), count)
        return ratio, kept, report
    return one, kept, report


def policy_objective(batch: TokenBatch, options: LossOptions) -> tuple[Tensor, TensorSums]:
    """The sum over this rank's tokens of (correction · loss - entropy_coef · entropy) · weight, and metrics.

    Divided by the number of unmasked tokens of the optimizer step it is the step's loss. Whatever stands in masked places,
    NaN included, reaches neither the sum nor a gradient.
    """
    safe = _without_masked(batch)
    loss_T, report = policy_loss_by_name(options.policy_loss)(safe, options)
    weight, kept, mismatch = rollout_correction(
        safe.old_logprobs_T, safe.rollout_logprobs_T, safe.mask_T, options
    )
    surrogate = torch.where(safe.mask_T & kept, weight * loss_T * safe.weights_T, 0.0).sum()
    total = surrogate
    if safe.entropy_T is not None:
        report["actor/entropy"] = _masked_sum(safe, safe.entropy_T)
        if options.entropy_coef:
            bonus = torch.where(safe.mask_T, safe.entropy_T * safe.weights_T, 0.0).sum()
            total = surrogate - options.entropy_coef * bonus
    log_ratio = safe.log_ratio_T.detach()
    report |= {
        "actor/pg_loss": (surrogate.detach(), safe.mask_T.sum()),
        "actor/ppo_kl": _masked_sum(safe, -log_ratio),
        "actor/ratio_mean": _masked_sum(safe, log_ratio.exp()),
    }
    return total, report | mismatch


def _without_masked(batch: TokenBatch) -> TokenBatch:
    """The batch with 0 in masked places, before any function sees them: 0 · inf and its gradient would be NaN."""

    def clean(x: Tensor) -> Tensor:
        return torch.where(batch.mask_T, x, 0.0)

    return TokenBatch(
        logprobs_T=clean(batch.logprobs_T),
        old_logprobs_T=clean(batch.old_logprobs_T),
        rollout_logprobs_T=None if batch.rollout_logprobs_T is None else clean(batch.rollout_logprobs_T),
        entropy_T=None if batch.entropy_T is None else clean(batch.entropy_T),
        advantages_T=clean(batch.advantages_T),
        mask_T=batch.mask_T,
        weights_T=clean(batch.weights_T),
        sequence_T=batch.sequence_T,
        num_sequences=batch.num_sequences,
        reduce=batch.reduce,
    )


def _masked_sum(batch: TokenBatch, values_T: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(batch.mask_T, values_T.detach(), 0.0).sum(), batch.mask_T.sum()
