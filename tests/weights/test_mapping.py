"""The table of names, without a model: complete for published checkpoints, each tensor once, parts that make the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_dapo.weights.mapping import Rule, portable_name, read_config, rules

SHAPES = Path(__file__).parents[3] / "shared/data/hf_shapes"


@pytest.mark.parametrize(
    "name", [f"{n}.json" for n in (
        "llama31_8b", "qwen25_1_5b", "qwen25_7b", "qwen25_14b", "qwen25_32b", "qwen3_0_6b", "qwen3_8b", "qwen3_32b",
        "qwen3_30b_a3b_base",
    )],
)  # fmt: skip
def test_published_checkpoints_map_completely(name):
    if not SHAPES.is_dir():
        pytest.skip("the lists of names and shapes do not lie beside this checkout")
    published = json.loads((SHAPES / name).read_text())
    config = read_config(published["config"], name)
    theirs = {key: tuple(shape) for key, shape in published["weights"].items()}
    if config.tied:
        theirs.pop("lm_head.weight", None)
    pairs = [pair for _, rule in rules(config) for pair in zip(rule.hf, rule.shapes, strict=True)]
    assert dict(pairs) == theirs and len(pairs) == len(theirs)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "rule",
    [
        Rule(("q", "k", "v"), ((32, 6), (16, 6), (16, 6)), "qkv", 0, groups=4),
        Rule(("q", "k", "v"), ((32,), (16,), (16,)), "qkv", 0, groups=4),
        Rule(("gate", "up"), ((12, 6), (12, 6)), "gate_up", 0),
        Rule(("o",), ((6, 32),), split=1),
        Rule(("embed",), ((10, 6),), split=0, vocab=True),
        Rule(("norm",), ((6,),)),
    ],
    ids=lambda rule: rule.hf[0] if isinstance(rule, Rule) else str(rule),
)
def test_parts_of_all_ranks_make_the_whole_and_come_apart_again(rule, tp_size):
    tensors = [torch.randn(shape) for shape in rule.shapes]
    padded = 16 if rule.vocab else None
    parts = []
    for rank in range(tp_size):
        slices = [t[rule.part(i, rank, tp_size, padded)] for i, t in enumerate(tensors)]
        rows = 16 // tp_size if rule.vocab else sum(s.size(0) for s in slices)
        parts.append(torch.full((rows, *slices[0].shape[1:]), torch.nan))
        for place, part in zip(rule.places(parts[-1], slices[0].size(0)), slices, strict=True):
            place.copy_(part.reshape(place.shape))
    if rule.split is None:
        whole = parts[0]
    elif rule.kind == "gate_up":
        whole = torch.cat([p.chunk(2)[0] for p in parts] + [p.chunk(2)[1] for p in parts])
    else:
        whole = torch.cat(parts, rule.split)
    assert len({p.shape for p in parts}) == 1
    assert all(torch.equal(a, b) for a, b in zip(rule.take_apart(whole), tensors, strict=True))
    if rule.vocab:
        assert not whole[10:].any()


def test_names_of_transformer_engine_are_those_of_the_portable_layers():
    for fused, plain in {
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.3.input_layernorm.weight",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight": "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.3.mlp.experts.linear_fc1.weight7": "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
        "decoder.layers.3.mlp.linear_fc1.weight": "decoder.layers.3.mlp.linear_fc1.weight",
    }.items():
        assert portable_name(fused) == plain
