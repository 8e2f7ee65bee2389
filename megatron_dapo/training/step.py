"""One rollout's optimizer steps, on Megatron's schedules: log-probs of the old policy, then the updates.

The loss returned to Megatron is a sum over this rank's tokens together with their count; Megatron divides every gradient
by the count of the whole step over micro-batches, data parallel and context parallel. No other denominator exists here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training import training as megatron_training

from megatron_dapo.algorithm.losses import TokenBatch, policy_objective
from megatron_dapo.config import Options
from megatron_dapo.distributed.collectives import sum_over_ranks
from megatron_dapo.training.batch import Layout, Microbatch, Minibatch
from megatron_dapo.training.experts import RouterLosses
from megatron_dapo.training.logprobs import logprobs_and_entropy
from megatron_dapo.training.reference import ReferencePolicy
from megatron_dapo.training.skips import Skip
from megatron_dapo.types import Sums, merge_sums

MicrobatchIterator = Iterator[Microbatch]


@dataclass
class Trainer:
    """The policy with its optimizer and scheduler, as Megatron built them, and DAPO's steps on them."""

    args: Any
    options: Options
    model: list[Any]
    optimizer: Any
    scheduler: Any
    layout: Layout
    reference: ReferencePolicy | None = None
    skipped: Skip | None = None
    """Why the last update was skipped, the same on every rank; None where it was taken."""

    def __post_init__(self) -> None:
        config = get_model_config(self.model[0])
        config.grad_scale_func = self.optimizer.scale_loss if self.optimizer else None
        config.finalize_model_grads_func = finalize_model_grads
        config.variable_seq_lengths = True
        if self.args.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.model])
            if self.args.align_grad_reduce:
                config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.model])
        if self.args.overlap_param_gather and self.args.align_param_gather:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.model])
        self.forward_backward = get_forward_backward_func()
        self.temperature = self.options.rollout.rollout_temperature
        self.router_losses = RouterLosses(self.model, config) if self.args.num_experts else None

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer step just taken."""
        return float(self.optimizer.param_groups[0]["lr"])

    def weights_are_finite(self) -> bool:
        """False where a weight of this rank is NaN or infinite."""
        return all(bool(torch.isfinite(p).all()) for chunk in self.model for p in chunk.parameters())

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Weights complete on every rank, dropout off: for forward passes outside an optimizer step."""
        overlapped = self.args.overlap_param_gather and self.optimizer is not None
        if overlapped:
            megatron_training.disable_forward_pre_hook(self.model, self.optimizer)
        for chunk in self.model:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in self.model:
                chunk.train()
            if overlapped:
                megatron_training.enable_forward_pre_hook(self.model)

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Log-probs of logits / ``temperature`` inside, instead of the rollouts' temperature."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    # --- Megatron's contracts: forward_step(data_iterator, model) and loss_func(output_tensor) -----------------------

    def forward_step(self, batches: MicrobatchIterator, model: Any) -> tuple[torch.Tensor, Any]:
        """One micro-batch forward; the loss follows on the last pipeline stage."""
        batch = next(batches)
        output = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)
        return output, partial(self.loss_func, batch)

    def loss_func(
        self, batch: Microbatch, output: torch.Tensor, non_loss_data: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """``output`` [1, t, padded vocab / tp] -> (sum of the token losses here, their count, report)."""
        logprobs, entropy = logprobs_and_entropy(
            output[0],
            batch.targets,
            rows_T=batch.predicts,
            temperature=self.temperature,
            vocab_size=self.args.vocab_size,
            tp_group=mpu.get_tensor_model_parallel_group(),
            with_entropy=not non_loss_data,
        )
        if non_loss_data:
            return logprobs
        tokens = TokenBatch(
            logprobs_T=logprobs,
            old_logprobs_T=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            rollout_logprobs_T=batch.rollout_logprobs,
            reference_logprobs_T=batch.reference_logprobs,
            entropy_T=entropy,
            advantages_T=batch.advantages,
            mask_T=batch.mask,
            weights_T=batch.weights,
            sequence_T=batch.sequence,
            num_sequences=batch.num_sequences,
            reduce=self._sum_over_context_parallel,
        )
        loss, report = policy_objective(tokens, self.options.loss)
        return loss, batch.mask.sum().to(torch.int), report

    def _sum_over_context_parallel(self, x: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(x, mpu.get_context_parallel_group()) if self.layout.cp_size > 1 else x

    # --- the two passes ---------------------------------------------------------------------------------------------

    def _run(self, batch: Minibatch, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches of one optimizer step; results on the last pipeline stage."""
        iterators = [iter(batch) for _ in self.model]
        results: list[Any] = self.forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=_one_or_all(iterators),
            model=self.model,
            num_microbatches=len(batch.microbatches),
            seq_length=self.args.seq_length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def fill_old_logprobs(self, batches: list[Minibatch]) -> None:
        """Log-probs of the policy before the updates, with the packing of the updates: the first ratio is exactly 1.

        A rollout of a single update needs no pass of its own: its old policy is the one that it updates.
        """
        kind = self.options.loss.old_logprobs
        if kind == "rollout":
            for micro in (micro for batch in batches for micro in batch):
                assert not micro.rollout_logprobs[micro.mask].isnan().any(), "the engine gave no log-probs"
                micro.old_logprobs = micro.rollout_logprobs
        if kind != "recompute" or len(batches) < 2:
            return
        with self.inference(), torch.no_grad():
            for micro, logprobs in self.logprobs(batches):
                micro.old_logprobs = logprobs

    def fill_reference_logprobs(self, batches: list[Minibatch]) -> None:
        """Log-probs of the reference policy, where the loss has a KL term."""
        if self.reference is None:
            return
        with self.inference(), torch.no_grad(), self.reference.in_place():
            for micro, logprobs in self.logprobs(batches):
                micro.reference_logprobs = logprobs

    def logprobs(self, batches: list[Minibatch]) -> Iterator[tuple[Microbatch, torch.Tensor]]:
        """Log-probs under the weights in place, micro-batch by micro-batch, on the last pipeline stage; elsewhere nothing."""
        for batch in batches:
            yield from zip(batch, self._run(batch, forward_only=True), strict=False)

    def update(self, batch: Minibatch) -> Sums:
        """One optimizer step; skipped, on all ranks together, where no token is in the loss or the gradient is not finite."""
        self.skipped = "no_tokens" if batch.num_loss_tokens == 0 else None
        if self.skipped:
            return self._shared({"actor/skipped_no_tokens": (1.0, 1.0)})
        reports, norm = self.gradients(batch)
        if not math.isfinite(norm):
            self.skipped = "nonfinite"
            return self._shared({"actor/skipped_nonfinite": (1.0, 1.0)})
        # Megatron's scheduler sets the rate of the steps it was told of. Told of this one before it is taken, warm-up over W
        # steps takes them at 1/W, 2/W .. 1; told afterwards, the first step would have rate 0 and move nothing.
        self.scheduler.step(increment=self.args.global_batch_size)
        self.optimizer.step()
        return merge_sums(
            reports,
            self._shared({
                "actor/grad_norm": (norm, 1.0),
                "actor/lr": (self.lr, 1.0),
                "actor/skipped_no_tokens": (0.0, 1.0),
                "actor/skipped_nonfinite": (0.0, 1.0),
                "actor/loss_tokens": (float(batch.num_loss_tokens), 1.0),
            }),
        )  # fmt: skip

    def gradients(self, batch: Minibatch) -> tuple[Sums, float]:
        """Forward and backward over one optimizer step's batch: this rank's metrics, and the norm of the whole gradient
        before clipping, the same on every rank.

        Preparing the gradients once more, as the optimizer's step does, is harmless (it copies) without a loss scaler;
        FP16, which has one, is refused at start.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.router_losses:
            self.router_losses.begin(batch)
        metrics = self._token_metrics(self._run(batch, forward_only=False))
        if self.router_losses:
            metrics |= self.router_losses.report(len(batch.microbatches))
        self.optimizer.prepare_grads()
        return metrics, float(self.optimizer.get_grad_norm())

    def _token_metrics(self, reports: list[dict[str, tuple[torch.Tensor, torch.Tensor]]]) -> Sums:
        """Sums over the micro-batches of this rank, counted on one tensor-parallel rank of the last stage."""
        if not reports or mpu.get_tensor_model_parallel_rank() != 0:
            return {}
        names = list(reports[0])
        table = torch.stack([torch.stack([torch.stack(r[n]).double() for n in names]) for r in reports])
        summed, largest = table.sum(0).tolist(), table[:, :, 0].amax(0).tolist()
        return {
            name: (most, 1.0) if name.endswith("/max") else (total, count)
            for name, (total, count), most in zip(names, summed, largest, strict=True)
        }

    @staticmethod
    def _shared(values: Sums) -> Sums:
        """Numbers that every rank knows are reported once."""
        return values if torch.distributed.get_rank() == 0 else {}


def _one_or_all(items: list[Any]) -> Any:
    """Megatron wants a list under interleaved pipelines and the bare thing otherwise."""
    return items[0] if len(items) == 1 else items
