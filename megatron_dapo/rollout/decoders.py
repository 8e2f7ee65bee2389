"""Forward passes with a KV cache on the training model's own weights: what the embedded engine feeds tokens through.

``DenseDecoder`` is the forward of the models people train here (RMSNorm, rotary positions, grouped queries, SwiGLU) with
as few operations a token as it takes: decoding one token is bound by their number, not by arithmetic. ``ModelDecoder``
runs the model's own forward, for everything else (experts, Transformer Engine's fused layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from megatron_dapo.compat.portable_layers import RMSNorm


class Decoder(Protocol):
    """Keeps the keys and values of a batch; every call appends to all of its sequences."""

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append ``tokens`` [B, n]; logits [B, padded vocab] of what follows the last one."""
        ...

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows of the batch only."""
        ...


def make_decoder(model: Any, batch: int, limit: int) -> Decoder:
    """The leanest decoder that computes what ``model`` (an unwrapped GPTModel) computes, for B sequences of ``limit`` tokens."""
    return DenseDecoder(model, batch, limit) if is_dense(model) else ModelDecoder(model, batch, limit)


def is_dense(model: Any) -> bool:
    """True where ``DenseDecoder`` knows every operation of the model."""
    c = model.config
    return bool(
        c.transformer_impl == "local"
        and model.position_embedding_type in ("rope", "yarn")
        and c.normalization == "RMSNorm"
        and c.gated_linear_unit
        and c.activation_func is F.silu
        and not (c.num_moe_experts or c.multi_latent_attention or c.add_bias_linear or c.rotary_interleaved)
        and not (
            c.window_size or c.attention_output_gate or c.use_mup or c.mtp_num_layers or c.fp32_residual_connection
        )
        and not (c.activation_func_clamp_value or c.glu_linear_offset or c.apply_residual_connection_post_layernorm)
        and not (c.qk_l2_norm or c.apply_query_key_layer_scaling or c.softmax_scale or c.no_rope_freq)
        and 2 * len(model.rotary_pos_emb.inv_freq) == c.kv_channels  # the whole head is rotated
    )


class ModelDecoder:
    """The model's own forward on Megatron's static inference context."""

    def __init__(self, model: Any, batch: int, limit: int) -> None:
        self.model = model
        self.context = StaticInferenceContext(batch, limit)
        self.at = 0

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``Decoder``."""
        n = tokens.size(1)
        positions = torch.arange(self.at, self.at + n, device=tokens.device).expand(tokens.size(0), -1)
        logits = self.model(tokens, positions, None, inference_context=self.context, runtime_gather_output=True)
        self.context.increment_sequence_len_offset(n)
        self.at += n
        last: torch.Tensor = logits[:, -1]
        return last

    def keep(self, rows: torch.Tensor) -> None:
        """See ``Decoder``."""
        self.context.max_batch_size = len(rows)
        memory = self.context.key_value_memory_dict
        for layer, (key, value) in memory.items():
            memory[layer] = (key[:, rows], value[:, rows])


@dataclass(frozen=True)
class _Layer:
    """References to one layer's parameters, in the order they are used."""

    input_norm: RMSNorm
    qkv: Any
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    projection: Any
    mlp_norm: RMSNorm
    up: Any
    down: Any


class DenseDecoder:
    """The dense decoder; keys and values lie as [B, groups, limit, d] a layer."""

    def __init__(self, model: Any, batch: int, limit: int) -> None:
        config = model.config
        self.tp_group = model.pg_collection.tp
        self.head_dim: int = config.kv_channels
        self.embedding = model.embedding
        self.final_norm = model.decoder.final_layernorm
        self.output_weight = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )
        self.layers = [_layer(layer) for layer in model.decoder.layers]
        self.groups: int = model.decoder.layers[0].self_attention.num_query_groups_per_partition
        rotary = model.rotary_pos_emb(limit)
        angles, scale = rotary if isinstance(rotary, tuple) else (rotary, 1.0)  # YaRN scales cos and sin
        angles = angles[:, 0, 0]  # [limit, d]
        sign = torch.ones(self.head_dim, device=angles.device)
        sign[
            : self.head_dim // 2
        ] = -1.0  # x cos + roll(x) sin, the first half of sin negated, is the rotation by halves
        self.cos = (angles.cos() * scale).to(config.params_dtype)
        self.sin = (angles.sin() * sign * scale).to(config.params_dtype)
        shape = (2, len(self.layers), batch, self.groups, limit, self.head_dim)
        self.cache = torch.empty(shape, dtype=config.params_dtype, device=self.cos.device)
        self.at = 0

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``Decoder``."""
        b, n = tokens.shape
        assert self.at == 0 or n == 1, "after the prompts, one token at a time"
        hidden = self.embedding(input_ids=tokens, position_ids=None).transpose(0, 1).flatten(0, 1)  # [B·n, h]
        place = slice(self.at, self.at + n)
        cos, sin = self.cos[place, None, None], self.sin[place, None, None]  # [n, 1, 1, d]
        for number, layer in enumerate(self.layers):
            mixed = F.linear(layer.input_norm(hidden), layer.qkv.weight, layer.qkv.bias)
            mixed = mixed.view(b, n, self.groups, -1, self.head_dim)
            hidden = self._add(hidden, self._attend(number, layer, mixed, cos, sin), layer.projection.weight)
            gate, up = F.linear(layer.mlp_norm(hidden), layer.up.weight).chunk(2, -1)
            hidden = self._add(hidden, F.silu(gate).mul_(up), layer.down.weight)
        self.at += n
        last = hidden.view(b, n, -1)[:, -1]
        logits = F.linear(self.final_norm(last), self.output_weight)
        if self.tp_group.size() == 1:
            return logits
        gathered: torch.Tensor = gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return gathered

    def keep(self, rows: torch.Tensor) -> None:
        """See ``Decoder``."""
        self.cache = self.cache[:, :, rows]

    def _add(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Residual plus a row-parallel product, of which every tensor-parallel rank has a part."""
        if self.tp_group.size() == 1:
            return torch.addmm(hidden, x, weight.t())
        whole: torch.Tensor = reduce_from_tensor_model_parallel_region(F.linear(x, weight), group=self.tp_group)
        return hidden + whole

    def _attend(
        self, number: int, layer: _Layer, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Attention over what is cached and what is new: [B·n, heads·d].

        ``mixed`` [B, n, groups, queries + 2, d]: a group's queries, key and value lie together in the fused projection,
        so one rotation serves queries and key.
        """
        b, n = mixed.shape[:2]
        turned, value = mixed[..., :-1, :], mixed[..., -1, :]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = torch.cat([layer.query_norm(turned[..., :-1, :]), layer.key_norm(turned[..., -1:, :])], dim=-2)
        turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        end = self.at + n
        keys, values = self.cache[0, number], self.cache[1, number]
        keys[:, :, self.at : end] = turned[..., -1, :].transpose(1, 2)
        values[:, :, self.at : end] = value.transpose(1, 2)
        keys, values = keys[:, :, :end], values[:, :, :end]
        if n == 1:  # the queries of a group attend together: [B·groups, queries, d]
            queries, keys = turned[:, 0, :, :-1].flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
            scores = torch.baddbmm(queries.new_empty(1, 1, 1), queries, keys, beta=0, alpha=self.head_dim**-0.5)
            return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(b, -1)
        queries = turned[..., :-1, :].flatten(2, 3).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attention, layer.mlp
    query_norm, key_norm = (
        norm if isinstance(norm, RMSNorm) else None for norm in (attention.q_layernorm, attention.k_layernorm)
    )
    return _Layer(
        input_norm=layer.input_layernorm,
        qkv=attention.linear_qkv,
        query_norm=query_norm,
        key_norm=key_norm,
        projection=attention.linear_proj,
        mlp_norm=layer.pre_mlp_layernorm,
        up=mlp.linear_fc1,
        down=mlp.linear_fc2,
    )
