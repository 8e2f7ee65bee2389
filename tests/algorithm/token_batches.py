"""Optimizer steps of a few short responses over a vocabulary of 5, packed whole or in part; single tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.algorithm.aggregation import sequence_loss_weights
from megatron_dapo.algorithm.losses import TokenBatch
from megatron_dapo.config import LossOptions

VOCAB = 5


def one_token(logprob: Tensor | float, **columns: Any) -> TokenBatch:
    """A batch of one unmasked token; old log-prob 0, advantage 1, weight 1 where ``columns`` do not say."""

    def column(value: Any) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).reshape(1)

    values = {"old_logprobs_T": 0.0, "advantages_T": 1.0, "weights_T": 1.0, **columns}
    batch = TokenBatch(
        logprobs_T=column(logprob),
        rollout_logprobs_T=None,
        entropy_T=None,
        mask_T=torch.tensor([True]),
        sequence_T=torch.tensor([0]),
        num_sequences=1,
        **{name: column(values[name]) for name in ("old_logprobs_T", "advantages_T", "weights_T")},
    )
    optional = {"rollout_logprobs_T", "entropy_T", "reference_logprobs_T"} & columns.keys()
    rest = {name: column(values[name]) for name in optional}
    return replace(batch, **rest)


@dataclass
class Step:
    """The responses of an optimizer step, float64: ``logits`` [all tokens, vocab] is the leaf trained."""

    lengths: list[int]
    group: list[int]
    mask: list[list[bool]]
    advantages: list[float]
    logits: Tensor
    targets: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    max_response_len: int = 9

    def rows(self, response: int) -> range:
        """Places of a response's tokens in the columns of all tokens."""
        start = sum(self.lengths[:response])
        return range(start, start + self.lengths[response])

    @property
    def num_tokens(self) -> int:
        """Unmasked tokens: the denominator."""
        return sum(sum(m) for m in self.mask)

    def pack(self, responses: list[int], options: LossOptions) -> TokenBatch:
        """The micro-batch of these responses, in this order."""
        tokens = np.array([sum(m) for m in self.mask])
        weights = sequence_loss_weights(tokens, np.array(self.group), options, self.max_response_len)
        place = torch.tensor([t for i in responses for t in self.rows(i)], dtype=torch.long)
        counts = torch.tensor([self.lengths[i] for i in responses], dtype=torch.long)

        def spread(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)

        log_softmax = self.logits[place].log_softmax(-1)
        return TokenBatch(
            logprobs_T=log_softmax.gather(1, self.targets[place, None])[:, 0],
            old_logprobs_T=self.old_logprobs[place],
            rollout_logprobs_T=self.rollout_logprobs[place],
            entropy_T=-(log_softmax.exp() * log_softmax).sum(-1),
            advantages_T=spread([self.advantages[i] for i in responses]),
            mask_T=torch.tensor([x for i in responses for x in self.mask[i]], dtype=torch.bool),
            weights_T=spread([float(weights[i]) for i in responses]),
            sequence_T=torch.arange(len(responses)).repeat_interleave(counts),
            num_sequences=len(responses),
        )


def ragged_step(drift: float = 0.6, seed: int = 0) -> Step:
    """Three prompts of seven ragged responses. The policy has drifted so far from the old one that
    it is clipped on every side; some tokens, the whole response 3 and the whole group of 5 and 6 are masked.
    """
    draws = torch.Generator().manual_seed(seed)
    lengths, group = [3, 1, 9, 4, 6, 2, 5], [0, 0, 0, 1, 1, 2, 2]
    mask = [[True] * n for n in lengths]
    mask[2][4] = mask[2][5] = mask[4][0] = False
    for whole in (3, 5, 6):
        mask[whole] = [False] * lengths[whole]
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    logits = normal(total, VOCAB)
    targets = torch.randint(VOCAB, (total,), generator=draws)
    before = (logits + drift * normal(total, VOCAB)).log_softmax(-1)
    old = before.gather(1, targets[:, None])[:, 0]
    return Step(
        lengths=lengths,
        group=group,
        mask=mask,
        advantages=[1.3, -0.7, 0.6, 0.9, -1.1, 1.0, -1.0],
        logits=logits.requires_grad_(),
        targets=targets,
        old_logprobs=old,
        rollout_logprobs=old + 0.5 * normal(total),
    )
