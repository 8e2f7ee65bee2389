"""The small files of a Hugging Face folder: what lies there, config.json, the ids that end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_config import HfConfig, read_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Files of a checkpoint: the index of its shards, or all weights in one."""

UNREAD = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt")
"""Endings of weights in formats that are not read."""


def is_hf_checkpoint(folder: str | None) -> bool:
    """True for a folder with a config.json and safetensors."""
    return folder is not None and Path(folder, "config.json").is_file() and any(Path(folder).glob("*.safetensors"))


def why_no_weights(folder: str) -> str:
    """What a Hugging Face folder without safetensors has instead, and the way out."""
    names = sorted(path.name for path in Path(folder).iterdir())
    if INDEX in names:
        return f"the shards that {INDEX} names are not there; fetch them again"
    if other := next((name for name in names if name.endswith(UNREAD)), None):
        return (
            f"its weights are in {other}, which is not read; save them as safetensors (save_pretrained of transformers)"
        )
    return "no safetensors there; fetch the weights, or name others with --load DIR"


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        InputError: it cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: not JSON ({reason}); fetch it again") from None


def load_config(folder: str) -> HfConfig:
    """The model of ``folder``.

    Raises:
        InputError: no config.json there, or one that is not mapped.
    """
    path = Path(folder, "config.json")
    if not path.is_file():
        raise InputError(
            f"--hf-checkpoint {folder}: no config.json there; give the folder of a Hugging Face checkpoint"
        )
    if Path(folder, "adapter_config.json").is_file():
        raise InputError(
            f"{folder}: adapter_config.json: an adapter lies there; merge it into the model's weights first"
        )
    return read_config(read_json(path), str(path))


def ending_ids(folder: str) -> set[int]:
    """Ids that end a text by config.json or generation_config.json, as SGLang reads them (both) and transformers (the latter).

    Raises:
        InputError: an eos_token_id is no id.
    """
    found: set[int] = set()
    for path in (Path(folder, "config.json"), Path(folder, "generation_config.json")):
        content = read_json(path) if path.is_file() else {}
        ids = content.get("eos_token_id") if isinstance(content, dict) else [content]
        for value in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{path}: eos_token_id {value!r} is no token id")
            found.add(value)
    return found
