"""Small models of every family, as transformers makes and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.5, "beta_fast": 2.0,
    "beta_slow": 0.25,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}

# No value is the same in all models: one that the code takes from nowhere would pass.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-2}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3 moe": ("Qwen3Moe", {"head_dim": 16, "tie_word_embeddings": False, **EXPERTS}),
    "qwen3 moe, one layer dense": (
        "Qwen3Moe",
        {"head_dim": 16, "tie_word_embeddings": False, "mlp_only_layers": [1], **EXPERTS},
    ),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama 3 rope tied": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "factor": 32.0, "rope_theta": 500000.0}},
    ),
    "llama, base no integer": (
        "Llama",
        {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_theta": 10.5, "rope_type": "default"},
        },
    ),
    "qwen2 yarn": ("Qwen2", {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "qwen3 yarn, other attention factor": (
        "Qwen3",
        {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.4},
        },
    ),
    "qwen3 moe, weights that do not sum to 1": (
        "Qwen3Moe",
        {"head_dim": 16, "tie_word_embeddings": False, **EXPERTS, "norm_topk_prob": False},
    ),
    "mistral in its window": ("Mistral", {"sliding_window": 40, "head_dim": 8, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8, "tie_word_embeddings": False}),
}


def save_model(folder: Path, name: str, **changed: Any) -> Any:
    """Random weights in ``folder``; the transformers model."""
    import torch
    import transformers

    family, special = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **special, **changed})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()
