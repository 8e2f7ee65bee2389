"""The trainer's side of the log-prob probe: what its weights of this moment say of a fixed sequence."""

from __future__ import annotations

import numpy as np
import torch

from megatron_dapo.distributed.collectives import gather_to_rank0
from megatron_dapo.rollout.engine import Policy
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import IntArray, Trajectories

LENGTH = 48
"""Tokens of the fixed sequence, where the recipe allows so long a one."""


class TrainerProbe:
    """``rollout.engine.Probe`` of a trainer; the sequence is of ids spread over the vocabulary, the same in every run of a
    model."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        length = min(LENGTH, trainer.options.longest_sequence)
        self.tokens: list[int] = np.random.default_rng(0).integers(0, trainer.args.vocab_size, length).tolist()

    def logprobs(self) -> list[float]:
        """Log-probs at temperature 1 of every token after the first, on rank 0 (elsewhere an empty list). Collective."""
        trainer = self.trainer
        rows = _copies(np.array(self.tokens, dtype=np.int64), trainer.layout.dp_size)
        batch = build_minibatch(rows, trainer.options, trainer.layout)
        here: dict[int, float] = {}
        with trainer.inference(), torch.no_grad(), trainer.at_temperature(1.0):
            for micro, logprobs in trainer.logprobs([batch]):
                places = micro.rollout_logprobs.long().tolist()
                here.update(zip(places, logprobs.double().tolist(), strict=True))
        everywhere: dict[int, float] = {}
        for part in gather_to_rank0(here):
            everywhere |= part
        return [everywhere[place] for place in sorted(everywhere)]


def policy_of(trainer: Trainer) -> Policy:
    """The trainer's model as engines see it."""
    return Policy(trainer.model, trainer.inference, TrainerProbe(trainer))


def _copies(token_ids: IntArray, n: int) -> Trajectories:
    """One copy for every data-parallel rank. Where a token stands in the response travels in the column of the engine's
    log-probs: context-parallel ranks see slices."""
    response = len(token_ids) - 1
    return Trajectories(
        tokens=[token_ids] * n,
        prompt_lengths=np.ones(n, dtype=np.int64),
        rollout_logprobs=[np.arange(response, dtype=np.float32)] * n,
        loss_mask=[np.ones(response, dtype=np.bool_)] * n,
        advantages=np.zeros(n),
        rewards=np.zeros(n),
        acc=np.zeros(n),
        group=np.arange(n, dtype=np.int64),
        weight_version=np.zeros(n, dtype=np.int64),
    )
