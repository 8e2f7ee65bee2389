"""The embedded engine: the training model itself generates, with Megatron's static KV cache. No server, no weight copies.

Rank 0 asks (``generate``); the other ranks serve (``follow``) until it says ``release``. Requests are dealt over the
data-parallel ranks; the tensor-parallel ranks of one of them sample the same ids from the same gathered logits. A
sample's randomness comes from its own seed, so neither batching nor the number of ranks changes what is drawn.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from megatron.core.utils import unwrap_model

from megatron_dapo.compat import device
from megatron_dapo.config import Options
from megatron_dapo.distributed.collectives import broadcast_object, gather_to_rank0
from megatron_dapo.rollout.decoders import Decoder, make_decoder
from megatron_dapo.rollout.engine import Decode, Note, Policy
from megatron_dapo.types import FinishReason, InputError, Request, Sample, SamplingParams, Sums

NOISE_BLOCK = 256
"""Uniform numbers drawn ahead for every sequence at a time."""


@dataclass(frozen=True)
class _Work:
    """What rank 0 sends: the prompts' ids, a seed each, and how to draw."""

    prompts: list[tuple[int, ...]]
    seeds: list[int]
    params: SamplingParams


@dataclass
class _Response:
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason


class EmbeddedEngine:
    """``rollout.engine.Engine`` on the training model.

    ``model`` is Megatron's list of (one) wrapped chunk, ``settled`` a context in which its weights are complete and dropout
    is off, ``decode`` turns ids into text (rank 0), ``batch_size`` sequences are decoded together on a data-parallel rank.
    """

    def __init__(
        self,
        model: list[Any],
        settled: Callable[[], Any],
        decode: Callable[[list[int]], str] | None,
        vocab_size: int,
        batch_size: int = 64,
    ) -> None:
        sizes = {
            "pipeline": mpu.get_pipeline_model_parallel_world_size(),
            "context": mpu.get_context_parallel_world_size(),
            "expert": mpu.get_expert_model_parallel_world_size(),
        }
        for kind, size in sizes.items():
            if size > 1:
                raise InputError(
                    f"--{kind}-{'' if kind == 'context' else 'model-'}parallel-size {size}: the embedded engine generates with "
                    "tensor and data parallelism only; set it to 1, or train on recorded rollouts with --load-rollouts"
                )
        self.model = unwrap_model(model)[0]
        self.settled = settled
        self.decode = decode
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.weight_version = 0

    def publish(self, version: int) -> None:
        """The trainer's weights are this engine's weights; only their number changes."""
        self.weight_version = version

    def report(self) -> Sums:
        """Nothing can happen on the way."""
        return {}

    def close(self) -> None:
        """Nothing to stop."""

    def generate(
        self,
        requests: list[Request],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        """One sample per request, in order. Rank 0 only; ``on_finish`` is called with how many are done, here and elsewhere."""
        work = _Work([r.prompt.token_ids for r in requests], [r.seed for r in requests], params)
        broadcast_object(work)
        assert self.decode is not None
        responses = self._serve(work, on_finish)
        return [
            Sample(
                token_ids=r.token_ids,
                logprobs=r.logprobs,
                finish_reason=r.finish_reason,
                weight_version=self.weight_version,
                text=self.decode(r.token_ids.tolist()),
            )
            for r in responses
        ]

    def follow(self) -> None:
        """Every rank but 0: generate what rank 0 asks for until it releases us."""
        while True:
            work: _Work | None = broadcast_object(None)
            if work is None:
                return
            self._serve(work, None)

    def release(self) -> None:
        """Rank 0: let the others go on with training."""
        broadcast_object(None)

    def _serve(self, work: _Work, on_finish: Callable[[int], None] | None) -> list[_Response]:
        """Generate this data-parallel rank's share and bring all shares together on rank 0, in order."""
        ranks = mpu.get_data_parallel_world_size()
        by_length = sorted(range(len(work.prompts)), key=lambda i: len(work.prompts[i]))
        mine = by_length[mpu.get_data_parallel_rank() :: ranks]
        done: dict[int, _Response] = {}
        with self.settled(), self._tensor_parallel_only(), torch.inference_mode(), InferenceMode.active():
            for start in range(0, len(mine), self.batch_size):
                batch = mine[start : start + self.batch_size]
                prompts, seeds = [work.prompts[i] for i in batch], [work.seeds[i] for i in batch]
                decoder = _BatchDecoder(self.model, self.vocab_size, prompts, seeds, work.params)
                done.update(zip(batch, decoder.run(), strict=True))
                if on_finish:
                    on_finish(min(len(done) * ranks, len(work.prompts)))
        shares = gather_to_rank0(done if mpu.get_tensor_model_parallel_rank() == 0 else {})
        everything = {i: response for share in shares for i, response in share.items()}
        return [everything[i] for i in range(len(work.prompts))] if dist.get_rank() == 0 else []

    @contextmanager
    def _tensor_parallel_only(self) -> Iterator[None]:
        """Sequence parallelism splits a sequence over ranks; one new token cannot be split."""
        if not self.model.config.sequence_parallel:
            yield
            return
        set_model_to_sequence_parallel(self.model, False)
        try:
            yield
        finally:
            set_model_to_sequence_parallel(self.model, True)


@dataclass
class _BatchDecoder:
    """Decode a batch of B sequences; prompts may differ in length: the tails of longer ones are fed, not sampled."""

    model: Any
    vocab_size: int
    prompts: list[tuple[int, ...]]
    seeds: list[int]
    params: SamplingParams
    alive: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = torch.tensor([len(p) for p in self.prompts])
        self.limit = int(self.lengths.max()) + self.params.max_tokens
        self.ids = torch.zeros(len(self.prompts), self.limit, dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt)
        self.logprobs = torch.zeros(len(self.prompts), self.limit)
        self.ends = torch.minimum(self.lengths + self.params.max_tokens, torch.tensor(self.limit))
        self.stopped = torch.zeros(len(self.prompts), dtype=torch.bool)
        self.alive = torch.arange(len(self.prompts))
        self.stop_ids = torch.tensor(self.params.stop_token_ids, dtype=torch.long)
        self.noise = [np.random.Generator(np.random.Philox(seed)) for seed in self.seeds]
        self.uniforms = np.zeros((len(self.prompts), 0))
        self.drawn = 0

    def run(self) -> list[_Response]:
        """Decode until every sequence has stopped or reached its limit."""
        decoder = make_decoder(self.model, len(self.prompts), self.limit)
        fed, now = 0, int(self.lengths.min())
        while len(self.alive):
            logits = decoder.feed(self.ids[self.alive, fed:now].to(device()))
            self._advance(logits[:, : self.vocab_size].float(), now)
            fed, now = now, now + 1
            self._retire(decoder, now)
        return [self._response(row) for row in range(len(self.prompts))]

    def _advance(self, logits: torch.Tensor, now: int) -> None:
        """Draw the token at ``now`` for every sequence alive that is past its prompt and has not stopped."""
        drawing = (self.lengths[self.alive] <= now) & (self.ends[self.alive] > now)
        if not bool(drawing.any()):
            return
        logp = torch.log_softmax(logits / (self.params.temperature or 1.0), dim=-1)
        uniform = torch.from_numpy(self._uniforms(now)).to(logits.device)
        chosen = draw(logp, uniform, self.params).clamp(max=self.vocab_size - 1)  # NaN draws beyond the last
        rows = self.alive[drawing]
        self.ids[rows, now] = chosen.cpu()[drawing]
        self.logprobs[rows, now] = logp.gather(1, chosen[:, None]).squeeze(1).cpu()[drawing]
        if bool(self.logprobs[rows, now].isnan().any()):
            raise InputError(
                "the policy's logits are NaN: its weights are not finite or too large; look at --lr, actor/grad_norm and the "
                "weights it started from, and go on from an earlier checkpoint"
            )
        self.stopped[rows] = torch.isin(self.ids[rows, now], self.stop_ids)
        self.ends[rows[self.stopped[rows]]] = now + 1

    def _uniforms(self, now: int) -> np.ndarray:
        """The uniform number of every sequence alive at its own response position, float64 [B alive]."""
        at = now - self.lengths[self.alive].numpy()
        while at.max() >= self.drawn:
            fresh = np.stack([g.random(NOISE_BLOCK) for g in self.noise])
            self.uniforms, self.drawn = (
                np.concatenate([self.uniforms, fresh], axis=1),
                self.drawn + NOISE_BLOCK,
            )
        picked: np.ndarray = self.uniforms[self.alive.numpy(), np.maximum(at, 0)]
        return picked

    def _retire(self, decoder: Decoder, now: int) -> None:
        """Drop finished sequences once they are a quarter of the batch, so that stragglers decode cheaply."""
        running = self.ends[self.alive] > now
        count = int(running.sum())
        if count and count > 0.75 * len(self.alive):
            return
        self.alive = self.alive[running]
        if count:
            decoder.keep(running.nonzero().squeeze(1).to(device()))

    def _response(self, row: int) -> _Response:
        begin, end = int(self.lengths[row]), int(self.ends[row])
        return _Response(
            token_ids=self.ids[row, begin:end].numpy().copy(),
            logprobs=self.logprobs[row, begin:end].numpy().copy(),
            finish_reason="stop" if bool(self.stopped[row]) else "length",
        )


def draw(logp: torch.Tensor, uniform: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Inverse-CDF draw from the (filtered) distribution: ids int64 [B].

    ``logp`` [B, V] is log-softmax(logits / temperature), ``uniform`` [B] in [0, 1). top-k first, then top-p on what is left:
    the smallest set of most likely tokens whose mass reaches top_p.
    """
    if params.temperature == 0.0:
        return logp.argmax(-1)
    probs = logp.double().exp()
    if 0 < params.top_k < probs.size(-1):
        smallest = probs.topk(params.top_k, dim=-1).values[:, -1:]
        probs = torch.where(probs >= smallest, probs, 0.0)
    if params.top_p < 1.0:
        ranked, order = (probs / probs.sum(-1, keepdim=True)).sort(dim=-1, descending=True)
        ranked = torch.where(ranked.cumsum(-1) - ranked < params.top_p, ranked, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None].to(cdf) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def make(args: Namespace, options: Options, policy: Policy, decode: Decode | None, note: Note) -> EmbeddedEngine:
    """The embedded engine of a run (``rollout.engine.MakeEngine``)."""
    batch_size = options.rollout.embedded_batch_size
    return EmbeddedEngine(policy.model, policy.inference, decode, args.vocab_size, batch_size)
