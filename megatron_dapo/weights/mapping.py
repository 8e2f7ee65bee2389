"""Names and shapes: a Megatron parameter, whole or a tensor-parallel part, and the Hugging Face tensors it is made of.

One table serves loading, export and publication. A family is what ``hf_config`` reads out of its ``config.json`` and ``rules``
makes of that; everything here is pure.

Example:
    rule = dict(rules(config))["decoder.layers.3.mlp.linear_fc1.weight"]
    rule.hf                                # ("model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight")
    rule.part(0, tp_rank=1, tp_size=2)     # the slice of gate_proj that rank 1 needs
    rule.places(parameter, rows=0)         # [its upper half, for the gate's part; its lower half, for up's]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_dapo.weights.hf_config import HfConfig, arguments_of, read_config

__all__ = ["HfConfig", "Rule", "arguments_of", "portable_name", "read_config", "rules"]

Kind = Literal["plain", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """How a Megatron parameter is made: of the tensors ``hf``, joined by ``kind``; ``split`` is the dimension that
    tensor-parallel ranks share (None: every rank has all of it); ``vocab``: rows beyond the vocabulary are padding."""

    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kind: Kind = "plain"
    split: int | None = None
    vocab: bool = False
    groups: int = 0

    def part(self, index: int, tp_rank: int, tp_size: int, padded_vocab: int | None = None) -> tuple[slice, ...]:
        """The slice of tensor ``index`` that a rank's part is made of; of a vocabulary, the rows there are."""
        shape = self.shapes[index]
        if self.split is None:
            return tuple(slice(0, n) for n in shape)
        size = padded_vocab if self.vocab and padded_vocab else shape[self.split]
        assert size % tp_size == 0, f"{self.hf[index]}: {size} does not divide by tensor-parallel size {tp_size}"
        begin, end = (min(size // tp_size * r, shape[self.split]) for r in (tp_rank, tp_rank + 1))
        return tuple(slice(begin, end) if d == self.split else slice(0, n) for d, n in enumerate(shape))

    def places(self, out: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """The views of Megatron's tensor ``out`` where the (sliced) Hugging Face tensors go, one for each; ``rows`` is how
        many rows of a plain tensor there are, those beyond them, padding of a vocabulary, become 0."""
        if self.kind == "gate_up":
            return list(out.chunk(2))
        if self.kind == "qkv":
            shares = [shape[0] // self.groups for shape in self.shapes]
            groups = out.size(0) // sum(shares)
            return list(torch.split(out.view(groups, sum(shares), *out.shape[1:]), shares, 1))
        out[rows:].zero_()
        return [out[:rows]]

    def take_apart(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The Hugging Face tensors of a whole Megatron tensor; padding of a vocabulary is dropped."""
        if self.kind == "gate_up":
            return [part.contiguous() for part in whole.chunk(2)]
        if self.kind == "qkv":
            rows = [shape[0] // self.groups for shape in self.shapes]
            by_group = whole.reshape(self.groups, sum(rows), *whole.shape[1:])
            return [part.flatten(0, 1).contiguous() for part in torch.split(by_group, rows, 1)]
        return [whole[: self.shapes[0][0]].contiguous()]


def portable_name(name: str) -> str:
    """Megatron's name with its portable layers' spelling: Transformer Engine fuses norms into the linear layer behind them
    and experts into one module."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    return re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name)


def rules(config: HfConfig) -> Iterator[tuple[str, Rule]]:
    """Every parameter of the model, by Megatron's portable name with global layer and expert numbers."""
    h, d = config.hidden, config.head_dim
    vocab = (config.vocab, h)
    yield "embedding.word_embeddings.weight", Rule(("model.embed_tokens.weight",), (vocab,), split=0, vocab=True)
    for layer in range(config.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention = theirs + "self_attn."
        rows = (config.heads * d, config.groups * d, config.groups * d)
        names = ("q_proj", "k_proj", "v_proj")
        yield ours + "input_layernorm.weight", Rule((theirs + "input_layernorm.weight",), ((h,),))
        for suffix, tail in (("weight", (h,)), *([("bias", ())] if config.qkv_bias else [])):
            hf = tuple(f"{attention}{name}.{suffix}" for name in names)
            shapes = tuple((n, *tail) for n in rows)
            yield ours + f"self_attention.linear_qkv.{suffix}", Rule(hf, shapes, "qkv", 0, groups=config.groups)
        if config.qk_norm:
            yield ours + "self_attention.q_layernorm.weight", Rule((attention + "q_norm.weight",), ((d,),))
            yield ours + "self_attention.k_layernorm.weight", Rule((attention + "k_norm.weight",), ((d,),))
        projection = Rule((attention + "o_proj.weight",), ((h, config.heads * d),), split=1)
        yield ours + "self_attention.linear_proj.weight", projection
        yield ours + "pre_mlp_layernorm.weight", Rule((theirs + "post_attention_layernorm.weight",), ((h,),))
        if config.experts and layer not in config.dense_layers:
            yield ours + "mlp.router.weight", Rule((theirs + "mlp.gate.weight",), ((config.experts, h),))
            for expert in range(config.experts):
                local = f"mlp.experts.local_experts.{expert}."
                yield from _mlp(ours + local, f"{theirs}mlp.experts.{expert}.", h, config.expert_ffn)
        else:
            yield from _mlp(ours + "mlp.", theirs + "mlp.", h, config.ffn)
    yield "decoder.final_layernorm.weight", Rule(("model.norm.weight",), ((h,),))
    if not config.tied:
        yield "output_layer.weight", Rule(("lm_head.weight",), (vocab,), split=0, vocab=True)


def _mlp(ours: str, theirs: str, hidden: int, ffn: int) -> Iterator[tuple[str, Rule]]:
    names = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
    yield ours + "linear_fc1.weight", Rule(names, ((ffn, hidden),) * 2, "gate_up", 0)
    yield ours + "linear_fc2.weight", Rule((theirs + "down_proj.weight",), ((hidden, ffn),), split=1)
