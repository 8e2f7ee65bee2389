"""What a Hugging Face ``config.json`` says about a model, read as transformers reads it, and Megatron's arguments for it.

transformers' own configuration class fills in what the file leaves out, so an absent key means that architecture's default.
Every key of those classes is in READ, in SUPPORTED (another value is refused) or in NO_EFFECT; a test walks the classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_rope import Yarn, of_all_layers, positive, rope_of, yarn_arguments


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart: bias on query, key and value; norms on query and key; experts."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False


FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, moe=True),
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral"),
}
"""Architectures that are mapped, by transformers' name."""

READ = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta",
    "partial_rotary_factor", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "eos_token_id",
}  # fmt: skip
"""Keys whose value is used (eos_token_id ends responses, see ``hf_folder``)."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
"""Keys that change the computation and have to have one of these values where the architecture knows them."""

REFUSED = {
    "quantization_config": "a quantised checkpoint; give the one in bf16 or fp32",
    "compression_config": "a quantised checkpoint; give the one in bf16 or fp32",
    "per_layer_config": "layers that differ from each other are not supported",
    "transformers_weights": "it names another file of weights, which is not read; remove the key and keep model.safetensors",
}
"""Keys that no mapped architecture may have a value for, and why."""

NO_EFFECT = {
    **dict.fromkeys(("transformers_version", "_name_or_path", "name_or_path", "auto_map", "id2label", "label2id",
                     "num_labels", "problem_type", "task_specific_params", "unsloth_version", "unsloth_fixed"), "notes"),
    **dict.fromkeys(("dtype", "torch_dtype"), "--bf16 decides; a tensor's own dtype is in its file"),
    **dict.fromkeys(("use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits",
                     "tie_last_hidden_states", "_attn_implementation_autoset"), "what a forward returns or keeps"),
    **dict.fromkeys(("chunk_size_feed_forward", "pretraining_tp", "is_encoder_decoder"), "the same result"),
    **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), "training flags decide"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "the tokenizer decides"),
}  # fmt: skip
"""Keys that change no logit, and why."""


@dataclass(frozen=True)
class HfConfig:
    """The numbers of a ``config.json`` that decide names, shapes and the computation. ``window``: no token sees further back
    in some layers. ``ignored``: keys that transformers' class for the architecture does not know, nor do we."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    rope_factor: float | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    yarn: Yarn | None = None
    window: int | None = None
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    norm_topk: bool = True
    dense_layers: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()


def read_config(raw: Any, source: str) -> HfConfig:
    """``config.json`` in the spelling of transformers 4 or 5; what it leaves out is the architecture's default.

    Raises:
        InputError: an architecture or a feature that is not mapped, or a value that makes no model.
    """
    if not isinstance(raw, dict):
        raise InputError(f"{source}: holds {_kind(raw)}, not an object; fetch the file again")
    architecture = _architecture(raw, source)
    family = FAMILIES[architecture]
    for name, why in REFUSED.items():
        if raw.get(name):
            raise InputError(f"{source}: {name}: {why}")
    known, resolved = _resolved(raw, family, source)
    for name, values in SUPPORTED.items():
        if name in known and (value := getattr(resolved, name)) not in values:
            raise InputError(f"{source}: {name} = {value!r} is not supported")
    number = _numbers(resolved, source)
    theta, factor, yarn = rope_of(resolved, source)
    heads, groups = number("num_attention_heads"), number("num_key_value_heads")
    head_dim = _head_dim(resolved, number, source)
    if heads % groups:
        raise InputError(f"{source}: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
    unknown = raw.keys() - known - READ - SUPPORTED.keys() - REFUSED.keys() - NO_EFFECT.keys() - _generation_keys()
    return HfConfig(
        architecture=architecture,
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        ffn=number("intermediate_size"),
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        vocab=number("vocab_size"),
        eps=positive(resolved.rms_norm_eps, "rms_norm_eps", source),
        rope_theta=theta,
        rope_factor=factor,
        tied=bool(resolved.tie_word_embeddings),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=number("max_position_embeddings"),
        yarn=yarn,
        window=_window(resolved, family, source),
        ignored=tuple(sorted(unknown)),
        **(_experts(resolved, number, source) if family.moe else {}),
    )


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _architecture(raw: dict[str, Any], source: str) -> str:
    """The architecture by ``architectures`` (SGLang's choice) and ``model_type`` (transformers'), which have to agree."""
    names, model_type = raw.get("architectures"), raw.get("model_type")
    if names and not (isinstance(names, list) and isinstance(names[0], str)):
        raise InputError(f"{source}: architectures is {names!r}, not a list of names")
    by_type = next((name for name, family in FAMILIES.items() if family.model_type == model_type), None)
    architecture = names[0] if names else by_type or str(model_type)
    if architecture not in FAMILIES:
        raise InputError(f"{source}: architecture {architecture} is not mapped; known are {', '.join(FAMILIES)}")
    if model_type is not None and model_type != FAMILIES[architecture].model_type:
        raise InputError(
            f"{source}: architectures says {architecture}, model_type says {model_type!r}; make them agree"
        )
    return str(architecture)


def _resolved(raw: dict[str, Any], family: Family, source: str) -> tuple[set[str], Any]:
    """The keys that transformers' class for this family has, and its instance for ``raw``."""
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    raw = copy.deepcopy(raw)
    for name in raw.keys() & {"rope_parameters", "rope_scaling"}:
        raw[name] = of_all_layers(raw[name], f"{source}: {name}")
    kind = CONFIG_MAPPING[family.model_type]
    loudness = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        resolved = kind.from_dict(raw)
    except Exception as error:  # whatever is wrong with the values
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{source}: transformers refuses it: {reason}") from None
    finally:
        logging.set_verbosity(loudness)
    return {field.name for field in fields(kind)}, resolved


def _generation_keys() -> set[str]:
    """Keys of generation_config.json, which old versions of transformers wrote into config.json: sampling has our flags."""
    from transformers import GenerationConfig

    return set(GenerationConfig().to_dict())  # type: ignore[no-untyped-call]


def _numbers(resolved: Any, source: str) -> Callable[[str], int]:
    """Reads integers above 0 out of a resolved config.json."""

    def number(name: str) -> int:
        value = getattr(resolved, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{source}: {name} is {value!r}, not an integer above 0")
        return value

    return number


def _head_dim(resolved: Any, number: Callable[[str], int], source: str) -> int:
    """head_dim where there is one (Qwen2 and Qwen3-MoE have no default), else what the heads divide the hidden size into."""
    if getattr(resolved, "head_dim", None) is None:
        hidden, heads = number("hidden_size"), number("num_attention_heads")
        if hidden % heads:
            raise InputError(
                f"{source}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; give head_dim"
            )
        head_dim = hidden // heads
    else:
        head_dim = number("head_dim")
    if head_dim % 2:
        raise InputError(f"{source}: head_dim is {head_dim}, rotary positions need an even number")
    return head_dim


def _window(resolved: Any, family: Family, source: str) -> int | None:
    """How many tokens the layers with a sliding window see; None where all layers see all tokens."""
    window = None
    if family.model_type in ("mistral", "qwen3_moe"):  # every layer
        window = resolved.sliding_window
    elif family.model_type in ("qwen2", "qwen3"):
        kinds = set(resolved.layer_types)
        if kinds - {"full_attention", "sliding_attention"}:
            raise InputError(f"{source}: layer_types has {', '.join(sorted(kinds))}; only attention is supported")
        if "sliding_attention" in kinds:
            window = resolved.sliding_window
            if window is None:
                raise InputError(
                    f"{source}: layer_types has sliding_attention, use_sliding_window or sliding_window do not"
                )
    if window is not None and window < 1:
        raise InputError(f"{source}: sliding_window is {window!r}, not an integer above 0")
    return window


def _experts(resolved: Any, number: Callable[[str], int], source: str) -> dict[str, Any]:
    step, only = number("decoder_sparse_step"), set(resolved.mlp_only_layers)
    experts, topk = number("num_experts"), number("num_experts_per_tok")
    if topk > experts:
        raise InputError(f"{source}: num_experts_per_tok {topk} is more than num_experts {experts}")
    return {
        "experts": experts,
        "topk": topk,
        "expert_ffn": number("moe_intermediate_size"),
        "norm_topk": bool(resolved.norm_topk_prob),
        "dense_layers": tuple(i for i in range(number("num_hidden_layers")) if i in only or (i + 1) % step),
    }


def arguments_of(config: HfConfig) -> dict[str, Any]:
    """Megatron's arguments, by name, for the model of ``config``."""
    theta = config.rope_theta
    arguments: dict[str, Any] = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn,
        "num_attention_heads": config.heads,
        "group_query_attention": True,
        "num_query_groups": config.groups,
        "kv_channels": config.head_dim,
        "vocab_size": config.vocab,
        "normalization": "RMSNorm",
        "norm_epsilon": config.eps,
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "untie_embeddings_and_output_weights": not config.tied,
        "position_embedding_type": "yarn" if config.yarn else "rope",
        "rotary_base": int(theta) if theta.is_integer() else theta,
        "use_rope_scaling": config.rope_factor is not None,
    }
    if config.rope_factor is not None:
        arguments["rope_scaling_factor"] = config.rope_factor
    if config.yarn:
        arguments |= yarn_arguments(config.yarn)
    if config.experts:
        arguments |= {
            "num_experts": config.experts,
            "moe_router_topk": config.topk,
            "moe_ffn_hidden_size": config.expert_ffn,
            "moe_router_pre_softmax": not config.norm_topk,  # the weights of the chosen experts then do not sum to 1
        }
        if config.dense_layers:
            pattern = [0 if i in config.dense_layers else 1 for i in range(config.layers)]
            arguments["moe_layer_freq"] = str(pattern).replace(" ", "")  # Megatron takes no spaces
    return arguments
