"""config.json against transformers' own configuration classes: every key of every family, present, absent and odd."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from megatron_dapo.training.arguments import parse
from megatron_dapo.training.model_flags import notes
from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_config import FAMILIES, NO_EFFECT, READ, SUPPORTED, arguments_of, read_config

TYPES = {family.model_type: name for name, family in FAMILIES.items()}
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 10,
}  # fmt: skip
GOLDEN = {  # groups, head_dim, ffn, eps, theta, tied, window, and whether chosen experts' weights are made to sum to 1
    "qwen2": (32, 128, 22016, 1e-6, 1e4, False, None, True),
    "qwen3": (32, 128, 22016, 1e-6, 1e4, False, None, True),
    "qwen3_moe": (4, 64, 6144, 1e-6, 1e4, False, None, False),
    "llama": (32, 128, 11008, 1e-6, 1e4, False, None, True),
    "mistral": (8, 128, 14336, 1e-6, 1e4, False, 4096, True),
}


def keys_of(model_type: str) -> list[str]:
    return [field.name for field in fields(CONFIG_MAPPING[model_type])]


@pytest.mark.parametrize("model_type", TYPES)
def test_every_key_of_transformers_class_is_read_or_refused_or_without_effect(model_type):
    classes = (READ, SUPPORTED, NO_EFFECT)
    assert {key: sum(key in known for known in classes) for key in keys_of(model_type)} == dict.fromkeys(
        keys_of(model_type), 1
    )


@pytest.mark.parametrize("model_type", TYPES)
def test_a_file_that_says_nothing_is_the_architectures_default(model_type):
    config = read_config({"model_type": model_type}, "config.json")
    found = (
        config.groups, config.head_dim, config.ffn, config.eps, config.rope_theta, config.tied, config.window,
        config.norm_topk,
    )  # fmt: skip
    assert found == GOLDEN[model_type]
    theirs = CONFIG_MAPPING[model_type]()
    assert (config.layers, config.hidden, config.heads, config.vocab, config.max_positions) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads, theirs.vocab_size,
        theirs.max_position_embeddings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "key"), [(model_type, key) for model_type in TYPES for key in keys_of(model_type)]
)
def test_an_absent_key_is_transformers_default(model_type, key):
    kind = CONFIG_MAPPING[model_type]
    spelled = kind(**SMALL, head_dim=16).to_dict()
    raw = {name: spelled[name] for name in {*keys_of(model_type), "head_dim"} & spelled.keys()}
    raw |= {"model_type": model_type, **({"layer_types": None} if "layer_types" in raw else {})}
    without = {name: value for name, value in raw.items() if name != key}
    default = next(field.default for field in fields(kind) if field.name == key)
    if key == "num_key_value_heads" and SMALL["num_attention_heads"] % (default or 1):
        for some in (without, raw):
            some["num_attention_heads"] = default
    assert read_config(without, "x") == read_config({**raw, key: default}, "x")


def test_what_an_architecture_does_not_know_it_does_not_follow():
    """attention_bias of Qwen2 and use_sliding_window of Mistral are no keys of theirs: transformers has the bias, and the
    window."""
    assert read_config({"model_type": "qwen2", "attention_bias": False}, "x").qkv_bias
    assert read_config({"model_type": "mistral", "use_sliding_window": False}, "x").window == 4096
    assert read_config({"model_type": "llama", "sliding_window": 5}, "x").window is None
    assert read_config({"model_type": "qwen2", "logit_scale": 2.0, "top_k": 5}, "x").ignored == ("logit_scale",)


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True}, 4096),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 32}, None),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 7}, None),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 7}, 7),
        ({"model_type": "qwen3", **SMALL, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, 4096),
        ({"model_type": "qwen3_moe"}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
    ],
)
def test_sliding_windows(raw, window):
    assert read_config(raw, "x").window == window


def test_rotary_settings_in_the_spelling_of_transformers_4_and_5():
    four = read_config({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}, "four")
    five = read_config({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "five")
    assert four == five and four.rope_theta == 5e5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": YARN, "rope_theta": 1e6},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "rope_theta": 1e6},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e6}}},
        {"rope_scaling": {**YARN, "factor": None, "beta_fast": None}, "rope_theta": 1e6},
    ],
)
def test_yarn_in_every_spelling(spelling):
    config = read_config({"model_type": "qwen2", "max_position_embeddings": 131072, **spelling}, "x")
    assert config.rope_theta == 1e6 and config.yarn is not None
    yarn = config.yarn
    assert (yarn.factor, yarn.original_positions, yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (
        4.0, 32768, 32.0, 1.0, True,
    )  # fmt: skip
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)


@pytest.mark.parametrize("theta", [10000.5, 1e6, 5e5, 1234567.875, 10000.0])
@pytest.mark.parametrize(
    "more",
    [
        {}, {"beta_fast": 16.0}, {"beta_slow": 3.0}, {"truncate": False}, {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 0.3}, {"mscale": 0.7}, {"factor": 1.0}, {"factor": 3.7},
    ],
)  # fmt: skip
def test_megatrons_yarn_frequencies_are_transformers(theta, more):
    """Through arguments_of: what Megatron's rotary embedding makes of the arguments, against transformers'."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = {
        "model_type": "qwen2", "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
                            "rope_theta": theta, **more},
    }  # fmt: skip
    a = arguments_of(read_config(raw, "x"))
    ours = YarnRotaryEmbedding(
        a["kv_channels"], rotary_base=a["rotary_base"], scaling_factor=a["rotary_scaling_factor"],
        original_max_position_embeddings=a["yarn_original_max_position_embeddings"], beta_fast=a["yarn_beta_fast"],
        beta_slow=a["yarn_beta_slow"], mscale=a["mscale"], mscale_all_dim=a["mscale_all_dim"],
        correction_range_round_to_int="yarn_correction_range_round_to_int" in a, use_cpu_initialization=True,
    )  # fmt: skip
    angles, scale = ours(2)
    frequencies, theirs = ROPE_INIT_FUNCTIONS["yarn"](CONFIG_MAPPING["qwen2"].from_dict(raw))
    assert torch.equal(angles[1, 0, 0, :64], frequencies) and scale == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([], "holds a list, not an object"),
        ({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]}, "model_type says 'qwen2'; make them agree"),
        ({"architectures": "LlamaForCausalLM"}, "not a list of names"),
        ({"architectures": None, "model_type": None}, "None is not mapped"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' expected float"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_hidden_layers": "4"}, "'num_hidden_layers' expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not an integer above 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "RoPE requires an even rotary dimension"),
        ({"head_dim": 3}, "head_dim is 3, rotary positions need an even number"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM is not mapped"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"compression_config": {"bits": 4}}, "quantised"),
        ({"transformers_weights": "other.safetensors"}, "names another file"),
        ({"per_layer_config": {"0": {"hidden_size": 4}}}, "layers that differ"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_scaling": [1]}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling dynamic is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "attn_factor": 2.0}}, "yarn has no attn_factor"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate"),
        ({"rope_scaling": {**YARN, "factor": 0.5, "attention_factor": 1.5}}, "attention factor 1.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 8192}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "none of full_attention"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 200}, "more than num_experts"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "use_sliding_window or sliding_window do not"),
    ],
)  # fmt: skip
def test_what_makes_no_model_is_one_line(changed, words):
    raw = {"model_type": "llama", **changed} if isinstance(changed, dict) else changed
    if isinstance(changed, dict) and "layer_types" not in changed and "decoder_sparse_step" not in changed:
        raw |= {key: value for key, value in SMALL.items() if key not in changed}
    with pytest.raises(InputError, match=words) as caught:
        read_config(raw, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ") and "\n" not in str(caught.value)


def flags_of(folder: Path, raw: dict[str, Any], *words: str) -> Any:
    (folder / "config.json").write_text(json.dumps({**SMALL, **raw}))
    short = ("--rollout-max-prompt-len", "32", "--rollout-max-response-len", "32")
    return parse(["--hf-checkpoint", str(folder), "--dry-run", *short, *words])[0]


def test_a_rotary_base_that_is_no_integer_reaches_megatron(tmp_path):
    args = flags_of(tmp_path, {"model_type": "llama", "rope_theta": 10000.5})
    assert args.rotary_base == 10000.5 and args.resolved["rotary_base"] == 10000.5
    args = flags_of(tmp_path, {"model_type": "llama", "rope_theta": 1e6})
    assert args.rotary_base == 1000000 and isinstance(args.rotary_base, int)
    with pytest.raises(InputError, match="--rotary-base 10000 contradicts .*says 10000.5"):
        flags_of(tmp_path, {"model_type": "llama", "rope_theta": 10000.5}, "--rotary-base", "10000")


def test_an_attention_factor_that_servers_do_not_read_is_refused_for_them(tmp_path):
    raw = {"model_type": "qwen2", "rope_scaling": {**YARN, "attention_factor": 1.5}}
    assert flags_of(tmp_path, raw).position_embedding_type == "yarn"
    with pytest.raises(InputError, match="attention_factor 1.5 is not read by SGLang, which computes with 1.13863"):
        flags_of(tmp_path, raw, "--rollout-engine", "sglang")


def test_longer_than_a_sliding_window_is_refused_for_training_and_evaluation(tmp_path):
    raw = {"model_type": "mistral", "sliding_window": 40}
    lengths = ("--rollout-max-prompt-len", "10", "--rollout-max-response-len", "30", "--overlong-buffer-len", "0")
    assert flags_of(tmp_path, raw, *lengths).seq_length == 40
    for more in (("--rollout-max-prompt-len", "11"), ("--eval-max-response-len", "31")):
        with pytest.raises(InputError, match="sliding_window 40: .* 41 tokens"):
            flags_of(tmp_path, raw, *lengths, *more)


def test_keys_that_nobody_knows_and_random_weights_are_said(tmp_path):
    args = flags_of(tmp_path, {"model_type": "llama", "logit_scale": 2.0, "use_cache": True})
    assert notes(args) == [
        f"{tmp_path}/config.json: transformers does not know logit_scale of LlamaForCausalLM: ignored",
    ]
    args.hf_checkpoint = None
    assert notes(args) == ["weights: random, for neither --load nor --hf-checkpoint names any"]
