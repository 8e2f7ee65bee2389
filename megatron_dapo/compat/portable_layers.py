"""Transformer layers in plain torch for Megatron's local spec, with what the stock ones refuse: RMSNorm under sequence
parallelism, and attention over packed rows, under context parallelism and against a KV cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_dapo.types import InputError


def zigzag_positions(length: int, cp_size: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that context-parallel rank ``rank`` holds, in its order: int64 [length / cp_size].

    The sequence is cut into 2·cp_size chunks; a rank has chunk ``rank`` and its mirror image, so that under a causal mask
    all ranks have the same work. ``length`` must divide by 2·cp_size.
    """
    assert length % (2 * cp_size) == 0, f"a sequence of {length} tokens does not divide into 2 x {cp_size} chunks"
    chunk = torch.arange(length // (2 * cp_size))
    return torch.cat([chunk + rank * len(chunk), chunk + (2 * cp_size - 1 - rank) * len(chunk)])


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension. Its weight is marked for Megatron to sum its gradient over the tensor-parallel ranks
    where each of them sees a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


@dataclass(frozen=True)
class _Bucket:
    """Sequences of about one length as a dense batch of ``rows``, padded to ``queries`` and ``keys`` tokens each. Padding stands
    behind every row that it is causally visible to. ``mask`` [rows, 1, queries, keys] is True where a query sees a key; None:
    causal from the top left."""

    rows: int
    queries: int
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """Buckets of a packed row, one behind the other, and the places in them of its queries [t] and of the keys of all
    context-parallel ranks [t · cp_size]; None where the row is that batch already, without any padding."""

    buckets: list[_Bucket]
    queries: torch.Tensor | None
    keys: torch.Tensor | None


@functools.lru_cache(maxsize=8)
def _plan(bounds: tuple[int, ...], cp_size: int, rank: int, device: torch.device) -> _Plan:
    """How to attend over the sequences between ``bounds`` (in tokens of all cp_size ranks) on rank ``rank``.

    The same plan serves all layers of a micro-batch, forward and backward, hence the cache.
    """
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(bounds, bounds[1:], strict=False):
        if end > start:
            by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    local = bounds[-1] // cp_size
    queries, keys = torch.empty(local, dtype=torch.int64), torch.empty(bounds[-1], dtype=torch.int64)
    buckets, first_query, first_key = [], 0, 0
    with torch.inference_mode(False):  # a plan made while sampling may be used while training
        for members in by_size.values():
            longest = max(end - start for start, end in members)
            bucket = _Bucket(len(members), longest // cp_size, longest, _mask(members, longest, cp_size, rank, device))
            for row, (start, end) in enumerate(members):
                mine = slice(start // cp_size, end // cp_size)
                queries[mine] = torch.arange((end - start) // cp_size) + first_query + row * bucket.queries
                for owner in range(cp_size):
                    held = slice(mine.start + owner * local, mine.stop + owner * local)
                    order = torch.arange(end - start) if cp_size == 1 else zigzag_positions(end - start, cp_size, owner)
                    keys[held] = order + first_key + row * bucket.keys
            buckets.append(bucket)
            first_query, first_key = first_query + bucket.rows * bucket.queries, first_key + bucket.rows * bucket.keys
        return _Plan(buckets, _unless_in_place(queries, first_query, device), _unless_in_place(keys, first_key, device))


def _mask(
    members: list[tuple[int, int]], longest: int, cp_size: int, rank: int, device: torch.device
) -> torch.Tensor | None:
    if cp_size == 1:
        return None
    places = torch.zeros(
        len(members), longest // cp_size, dtype=torch.int64
    )  # padding sees the first key: some it must
    for row, (start, end) in enumerate(members):
        places[row, : (end - start) // cp_size] = zigzag_positions(end - start, cp_size, rank)
    return (torch.arange(longest) <= places[..., None])[:, None].to(device)


def _unless_in_place(places: torch.Tensor, size: int, device: torch.device) -> torch.Tensor | None:
    """``places`` on the device; None where every row is where it has to be already."""
    in_place = len(places) == size and bool((places == torch.arange(size)).all())
    return None if in_place else places.to(device)


class _Spread(torch.autograd.Function):
    """Rows x -> zeros [size, ...] with x at ``places``, which are all different: so the way back is a selection, where autograd
    would add up, row by row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Collect(torch.autograd.Function):
    """The rows of x at ``places``, which are all different: ``_Spread`` the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, places, grad), None


def _batches(x: torch.Tensor, places: torch.Tensor | None, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Packed rows [t, heads, d] as a batch [rows, tokens, heads, d] per bucket."""
    sizes = [rows * tokens for rows, tokens in shapes]
    spread = x if places is None else _Spread.apply(x, places, sum(sizes))  # type: ignore[no-untyped-call]
    return [part.unflatten(0, shape) for part, shape in zip(spread.split(sizes), shapes, strict=True)]


class CausalAttention(torch.nn.Module):
    """Causal scaled-dot-product attention with grouped queries, as a core attention of Megatron.

    Dense rows [s, b, heads, d]; packed rows [t, heads, d] with ``PackedSeqParams``, whose bounds count tokens over all
    context-parallel ranks; under context parallelism every sequence lies zigzag over the ranks, and keys and values are
    gathered. Queries fewer than keys are the newest of a KV cache (mask from the bottom right).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group, self.scale = groups.cp, softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[s, b, heads·d] of dense rows, [t, heads·d] of packed ones."""
        assert attention_mask is None and attention_bias is None, "the mask is causal and follows from the shapes"
        cp_size = self.cp_group.size()
        if packed_seq_params is not None:
            p = packed_seq_params
            bounds = p.cu_seqlens_q if p.cu_seqlens_q_padded is None else p.cu_seqlens_q_padded
            return self._packed(query, key, value, tuple(bounds.tolist()))
        if cp_size == 1:
            return self._dense(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1).flatten(2)
        rows, batch = query.shape[:2]
        bounds = tuple(range(0, (batch + 1) * rows * cp_size, rows * cp_size))
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        packed = self._packed(query, key, value, bounds)
        return packed.view(batch, rows, -1).transpose(0, 1)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: tuple[int, ...]
    ) -> torch.Tensor:
        """One attention per bucket of similar lengths, never one per sequence: on a CPU that is most of the time saved."""
        cp_size = self.cp_group.size()
        assert bounds[-1] == len(query) * cp_size, (
            f"bounds end at {bounds[-1]}, the ranks hold {len(query)} x {cp_size} tokens"
        )
        if cp_size > 1:
            both = torch.cat([key, value], dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        plan = _plan(bounds, cp_size, self.cp_group.rank(), query.device)
        shapes = [(b.rows, b.keys) for b in plan.buckets]
        queries = _batches(query, plan.queries, [(b.rows, b.queries) for b in plan.buckets])
        keys, values = (_batches(x, plan.keys, shapes) for x in (key, value))
        parts = zip(queries, keys, values, plan.buckets, strict=True)
        outputs = torch.cat([self._dense(q, k, v, b.mask).flatten(2).flatten(0, 1) for q, k, v, b in parts])
        return outputs if plan.queries is None else _Collect.apply(outputs, plan.queries)  # type: ignore[no-untyped-call]

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, Lq, heads, d] with keys and values [b, Lk, groups, d] -> [b, Lq, heads, d]."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        new, seen = q.size(2), k.size(2)
        if mask is None and new == 1:  # sees all keys: the heads that share a key become rows of one product
            folded = q.reshape(q.size(0), k.size(1), -1, q.size(3))
            return (
                F.scaled_dot_product_attention(folded, k, v, scale=self.scale).reshape(*q.shape[:3], -1).transpose(1, 2)
            )
        if mask is None and new < seen:
            mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        causal, grouped = mask is None, q.size(1) != k.size(1)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )
        return output.transpose(1, 2)


def _refuse_unsupported(config: Any) -> None:
    refused = {
        "--multi-latent-attention": config.multi_latent_attention,
        "--window-size": config.window_size is not None,
        "--softmax-type": config.softmax_type != "vanilla",
        "--attention-dropout": config.attention_dropout != 0,
        "--apply-layernorm-1p": config.layernorm_zero_centered_gamma,
        "--apply-query-key-layer-scaling": config.apply_query_key_layer_scaling,
    }
    for flag, given in refused.items():
        if given:
            raise InputError(f"{flag}: the layers of --transformer-impl local do not have it; use transformer_engine")


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's local block spec of this pipeline stage, dense and MoE layers, with the norm and attention from here.

    Raises:
        InputError: the model needs a feature that only Transformer Engine's layers have.
    """
    _refuse_unsupported(config)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    rms = config.normalization == "RMSNorm"
    for layer in block.layer_specs:  # entries are shared between layers; setting them again changes nothing
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if rms:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if rms and config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if rms:
        block.layer_norm = RMSNorm
    return block


def transformer_engine_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's block spec of this pipeline stage on Transformer Engine's layers."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The layers of this pipeline stage, by ``--transformer-impl``.

    Raises:
        InputError: an implementation that is neither, or features that local layers lack.
    """
    if config.transformer_impl == "transformer_engine":
        return transformer_engine_spec(config, vp_stage)
    if config.transformer_impl != "local":
        raise InputError(f"--transformer-impl {config.transformer_impl}: use local or transformer_engine")
    return layer_spec(config, vp_stage)
