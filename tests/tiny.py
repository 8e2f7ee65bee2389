"""A whole task in a folder, small enough for seconds: character tokenizer, sums as problems, a recipe of a two-layer model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dapo.config.recipe import toml_value
from megatron_dapo.data.tokenizer import write_character_tokenizer

ALPHABET = "0123456789+-= Answer:\n"

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "make_vocab_size_divisible_by": 16,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "disable_bias_linear": True,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
}

RUN = {
    "seed": 1234,
    "num_rollout": 2,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": 8,
    "global_batch_size": 16,
    "num_steps_per_rollout": 2,
    "rollout_max_prompt_len": 16,
    "rollout_max_response_len": 12,
    "overlong_buffer_len": 4,
    "prompt_template": "none",
    "reward_num_workers": 1,
    "max_num_gen_batches": 2,
    "on_exhausted": "keep_zero_signal",
    "lr": 1e-3,
    "lr_warmup_rollouts": 0,
    "progress": False,
}


def write_task(folder: Path, rows: list[dict[str, Any]] | None = None, **overrides: Any) -> Path:
    """Write tokenizer, problems and recipe into ``folder``; the recipe's path. ``overrides`` are flags; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer"
    write_character_tokenizer(tokenizer, "".join(dict.fromkeys(ALPHABET)))
    if rows is None:
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        **MODEL,
        **RUN,
        "vocab_size": len(dict.fromkeys(ALPHABET)) + 3,
        "tokenizer_model": str(tokenizer),
        "prompt_data": [str(folder / "problems.jsonl")],
        "run_dir": str(folder / "run"),
        **overrides,
    }
    recipe = folder / "recipe.toml"
    recipe.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in values.items() if value is not None))
    return recipe
