"""Log-probability of given tokens and entropy of the policy, from logits that are split over the vocabulary.

One pass over the logits forward and one backward, chunked over tokens: no rank ever holds a probability matrix of all its
tokens or a row of the whole vocabulary. Only numbers per token travel between the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

LEAST_LOGITS = 2**16
"""Logits of a chunk, where its size is not given: 256 KiB of fp32."""


@dataclass(frozen=True)
class _Shard:
    """This rank's columns of the vocabulary: global ids ``first`` .. ``first + real`` - 1; columns from ``real`` on are
    padding."""

    first: int
    real: int
    temperature: float
    chunk: int
    group: Any

    def chunks(self, logits: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(tokens, their scaled logits in a new tensor of at least fp32 [chunk, real])."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        for start in range(0, len(rows) if self.real else 0, self.chunk):
            tokens = slice(start, min(start + self.chunk, len(rows)))
            yield tokens, logits[:, : self.real].index_select(0, rows[tokens]).to(exact).div_(self.temperature)

    def owned(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(True where the target is a column here, that column or 0), each [T]."""
        column = targets - self.first
        mine = (column >= 0) & (column < self.real)
        return mine, torch.where(mine, column, 0)

    def reduce(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values


class _LogprobsAndEntropy(torch.autograd.Function):
    """z = logits / temperature, p = softmax(z) over all ranks: log p_y and H = -sum p log p.

    d log p_y / dz_j = 1[j = y] - p_j and dH / dz_j = -p_j (log p_j + H). Saved: the logits as they came, and per token the
    log of the normaliser and H; p is made again, chunk by chunk, backward.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, shard: _Shard, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        lowest = torch.finfo(exact).min
        top = torch.full((len(rows),), lowest, dtype=exact, device=logits.device)
        mass, moment, target = torch.zeros(3, len(rows), dtype=exact, device=logits.device)
        mine, column = shard.owned(targets)
        for tokens, z in shard.chunks(logits, rows):
            picked = z.gather(1, column[tokens, None]).squeeze(1)
            target[tokens] = torch.where(mine[tokens], picked, 0.0)
            top[tokens] = z.amax(1).clamp_(min=lowest)
            z.sub_(top[tokens, None])
            e = z.exp()
            mass[tokens] = e.sum(1)
            if with_entropy:  # a logit of -inf has no mass, and 0 x -inf is not a number
                moment[tokens] = e.mul_(z.clamp_(min=-1e4)).sum(1)
        here = top.clone()
        top = shard.reduce(top, dist.ReduceOp.MAX)
        scale = (here - top).exp()
        moment = scale * (moment + (here - top) * mass)
        mass, moment, target = shard.reduce(torch.stack([scale * mass, moment, target]), dist.ReduceOp.SUM)
        normaliser = top + mass.log()
        entropy = mass.log() - moment / mass if with_entropy else torch.full_like(mass, float("nan"))
        ctx.save_for_backward(logits, rows, targets, normaliser, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return target - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        for_logprob, for_entropy = grads
        logits, rows, targets, normaliser, entropy = ctx.saved_tensors
        mine, column = ctx.shard.owned(targets)
        if for_logprob is None:
            for_logprob = torch.zeros_like(normaliser)
        grad = torch.zeros_like(logits)
        for tokens, z in ctx.shard.chunks(logits, rows):
            weight = for_logprob[tokens, None]
            logp = z.sub_(normaliser[tokens, None])
            dz = logp.exp().neg_()
            if for_entropy is None:
                dz.mul_(weight)
            else:
                through = logp.clamp_(min=-1e4).add_(entropy[tokens, None]).mul_(for_entropy[tokens, None])
                dz.mul_(through.add_(weight))
            dz.scatter_add_(1, column[tokens, None], torch.where(mine[tokens, None], weight, 0.0))
            grad[:, : ctx.shard.real].index_copy_(0, rows[tokens], dz.div_(ctx.shard.temperature).to(grad.dtype))
        return grad, None, None, None, None


def logprobs_and_entropy(
    logits: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float,
    vocab_size: int,
    tp_group: Any,
    chunk: int | None = None,
    with_entropy: bool = True,
    rows_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy (nats) of softmax(logits / temperature), for every token.

    Args:
        logits: [t, V / tp], this rank's columns of the padded vocabulary, bf16 or fp32; left as they are.
        targets_T: int64 [T], global ids below ``vocab_size``.
        temperature: of the sampling, above 0.
        vocab_size: the vocabulary without padding; columns of higher ids do not exist for the softmax.
        tp_group: tensor-parallel ranks in the order of their columns; None: this process has them all.
        chunk: tokens worked on at a time, by default T / 64 and at most 1024, so that the fp32 scratch of a few times
            chunk x V / tp stays small beside the gradient, which is the one full-sized tensor made here; but at least
            2^16 logits, below which the calls cost more than the memory.
        with_entropy: False leaves the entropy out; it is NaN then.
        rows_T: int64 [T], the row of ``logits`` that predicts each target, none of them twice; None: t = T, in order.

    Returns:
        fp32 [T] twice, the same on every rank and differentiable on each towards its own columns.
    """
    columns = logits.size(1)
    chunk = max(min(1024, len(targets_T) // 64), LEAST_LOGITS // columns, 16) if chunk is None else chunk
    rows_T = torch.arange(len(logits), device=logits.device) if rows_T is None else rows_T
    assert temperature > 0 and chunk > 0 and logits.dim() == 2 and targets_T.shape == rows_T.shape
    assert not len(targets_T) or 0 <= int(targets_T.min()) <= int(targets_T.max()) < vocab_size, "a target is no token"
    first = columns * (tp_group.rank() if tp_group is not None else 0)
    real = min(max(vocab_size - first, 0), columns)
    shard = _Shard(first, real, temperature, chunk, tp_group)
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, rows_T, targets_T, shard, with_entropy)  # type: ignore[no-untyped-call]
    return logprobs, entropy
