"""The tiny task with a Hugging Face model behind it, for SGLang servers on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tiny import ALPHABET, MODEL, write_task

sys.path.insert(0, str(Path(__file__).parent / "weights"))

from hf_models import save_model  # noqa: E402

VOCAB = len(dict.fromkeys(ALPHABET)) + 3
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}


def write_served_task(folder: Path, family: str = "qwen2", **overrides: Any) -> Path:
    """Write checkpoint, tokenizer, problems and a recipe that generates with one SGLang server; the recipe's path."""
    save_model(folder / "hf", family, **SHAPE)
    nothing = dict.fromkeys(MODEL, None) | {"vocab_size": None, "make_vocab_size_divisible_by": 16}
    servers = {
        "hf_checkpoint": str(folder / "hf"),
        "rollout_engine": "sglang",
        "sglang_skip_tokenizer_init": True,
        "sglang_context_length": 128,
    }
    return write_task(folder, **{**nothing, **servers, **overrides})
