"""The model that the benchmarks share: 1.8M parameters, Qwen2 architecture, as a Megatron trainer and in transformers."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {"layers": 6, "hidden": 160, "ffn": 448, "heads": 8, "groups": 2, "vocab": 256}

FLAGS = [
    "--num-layers", "6", "--hidden-size", "160", "--ffn-hidden-size", "448", "--num-attention-heads", "8",
    "--group-query-attention", "--num-query-groups", "2", "--kv-channels", "20",
    "--vocab-size", "256", "--make-vocab-size-divisible-by", "8", "--untie-embeddings-and-output-weights",
    "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--swiglu", "--disable-bias-linear", "--add-qkv-bias",
    "--position-embedding-type", "rope", "--rotary-base", "10000",
    "--rollout-batch-size", "16", "--n-samples-per-prompt", "4", "--global-batch-size", "64",
    "--num-steps-per-rollout", "1", "--rollout-max-prompt-len", "64", "--rollout-max-response-len", "192",
    "--overlong-buffer-len", "0", "--max-tokens-per-gpu", "16384", "--lr", "1e-4",
]  # fmt: skip


def megatron_trainer(*extra: str) -> Any:
    """A trainer of that shape on this machine."""
    from megatron_dapo import compat

    compat.install()
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.setup import build_trainer

    folder = Path(tempfile.mkdtemp(prefix="megatron_dapo_bench_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    args, options = parse([*FLAGS, "--run-dir", str(folder), *extra])
    return build_trainer(args, options)


def transformers_model() -> Any:
    """The same shape in transformers, in fp32 with its fastest attention here (SDPA)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=SHAPE["vocab"],
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["ffn"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["groups"],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).to(torch.float32)
