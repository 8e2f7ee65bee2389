"""The trainer's weights as servers take them: Hugging Face names, in full precision or fp8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_dapo.distributed.collectives import share_dicts
from megatron_dapo.rollout.engine import Policy
from megatron_dapo.servers.checksum import checksums
from megatron_dapo.servers.fp8 import quantized
from megatron_dapo.weights.gather import gather_hf, save_hf
from megatron_dapo.weights.hf_folder import load_config


class PolicyWeights:
    """Lives on every rank. ``source`` is the Hugging Face folder that the run began with."""

    def __init__(self, policy: Policy, source: str, fp8: bool) -> None:
        self.policy, self.source, self.fp8 = policy, source, fp8
        self.config = load_config(source)

    def complete(self) -> AbstractContextManager[Any]:
        """A context in which the weights are complete on every rank."""
        return self.policy.inference()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This pipeline stage's, whole, on its first rank; collective, inside ``complete``."""
        tensors = gather_hf(self.policy.model, self.config, to_stage_head=True)
        return quantized(tensors) if self.fp8 else tensors

    def save(self, folder: str) -> None:
        """Write them as a Hugging Face checkpoint. Collective."""
        with self.complete():
            save_hf(self.policy.model, self.source, folder)

    def checksums(self, tp_size: int) -> dict[str, list[str]]:
        """What the checksums of servers with ``tp_size`` ranks must be, on every rank. Collective."""
        with self.complete():
            return share_dicts(checksums(self.tensors(), tp_size))
