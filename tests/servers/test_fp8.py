"""FP8 for rollout servers: scales, errors, what is quantised and what is not."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_dapo.servers.fp8 import BLOCK, LARGEST, dequantize, quantize, quantized, server_flags


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 5), (1, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block_has_the_scale_of_its_largest_entry(shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).to(dtype)
    small, scale = quantize(weight)
    assert small.shape == weight.shape and small.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert scale.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    for row in range(scale.size(0)):
        for column in range(scale.size(1)):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK].float()
            assert scale[row, column].item() == pytest.approx(block.abs().max().item() / LARGEST, rel=1e-6)


def test_an_entry_is_off_by_at_most_half_a_step():
    """e4m3 has 3 bits behind the point: 1/16 of the entry, or half the smallest step (2^-10) of its block's scale."""
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    small, scale = quantize(weight)
    wide = scale.repeat_interleave(BLOCK, 0)[:300].repeat_interleave(BLOCK, 1)[:, :200]
    off = (dequantize(small, scale) - weight).abs()
    assert bool((off <= torch.maximum(weight.abs() / 16, wide * 2.0**-10) * 1.001).all())


def test_zeros_and_numbers_of_e4m3_come_back_exactly():
    weight = torch.zeros(256, 128)
    weight[128, 0], weight[129, 1], weight[130, 2] = 448.0, -1.5, 2.0**-9
    small, scale = quantize(weight)
    assert scale.tolist() == [[1.0], [1.0]] and torch.equal(dequantize(small, scale), weight)


def test_one_large_entry_costs_its_own_block_only():
    weight = torch.full((256, 256), 0.01)
    weight[0, 0] = 1000.0
    error = (dequantize(*quantize(weight)) - weight).abs()
    assert error[128:].max() < 1e-3 and error[:, 128:].max() < 1e-3 and error[:128, :128].max() > 1e-3


def test_only_the_weights_of_linear_layers_change():
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ]
    stream = list(quantized((name, torch.randn(4, 4) if "norm" not in name else torch.randn(4)) for name in names))
    small = [name for name, tensor in stream if tensor.dtype == torch.float8_e4m3fn]
    assert small == [names[1], names[4]]
    assert [name for name, _ in stream if name not in names] == [name + "_scale_inv" for name in small]


def test_a_stream_carries_the_scale_that_gives_the_weight_back():
    weight, name = torch.randn(200, 130), "model.layers.0.mlp.up_proj.weight"
    (_, small), (_, scale) = quantized([(name, weight)])
    assert torch.equal(dequantize(small, scale), dequantize(*quantize(weight)))
    assert (dequantize(small, scale) - weight).abs().max() <= 2**-4 * weight.abs().max()


def test_servers_are_told_the_same_blocks():
    config = json.loads(server_flags()["json-model-override-args"] or "")["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [BLOCK, BLOCK]
