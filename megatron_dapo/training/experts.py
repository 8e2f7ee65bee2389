"""The routers of mixture-of-experts models: their auxiliary losses in DAPO's denominators, and what is reported of them."""

from __future__ import annotations

from typing import Any

from megatron.core import mpu
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import Router

from megatron_dapo.training.batch import Minibatch
from megatron_dapo.types import Sums


class RouterLosses:
    """Megatron hands every micro-batch's auxiliary loss down times its tokens, prompts and padding included, and divides
    all gradients by the tokens in DAPO's loss. ``scale`` takes that ratio out again: what is left is the coefficient times
    the mean of the auxiliary loss over the step's tokens, whatever share of them is in the loss."""

    def __init__(self, model: list[Any], config: Any) -> None:
        self.routers = sum(isinstance(m, Router) for chunk in model for m in chunk.modules())
        self.scale = 1.0
        config.moe_grad_scale_func = lambda: self.scale

    def begin(self, batch: Minibatch) -> None:
        """Before the forward and backward passes of an optimizer step."""
        self.scale = batch.num_loss_tokens / batch.num_tokens
        get_moe_metrics_tracker().clear()

    def report(self, num_microbatches: int) -> Sums:
        """Mean auxiliary losses (coefficient left out) over layers and micro-batches. A rank of a tensor- and
        context-parallel group knows its part of the sum."""
        ranks = mpu.get_tensor_model_parallel_world_size() * mpu.get_context_parallel_world_size()
        count = self.routers * num_microbatches / ranks
        recorded = get_moe_metrics_tracker().metrics
        return {
            f"moe/{name}": (float(e.values.sum()), count) for name, e in recorded.items() if name.endswith("ing_loss")
        }
