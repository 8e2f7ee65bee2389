"""What lies beside the weights of an exported Hugging Face checkpoint: configuration, tokenizer, licence, model card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from megatron_dapo.weights.hf_folder import read_json

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja", "generation_config.json", "LICEN[CS]E*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip
"""Files that an export takes over from the checkpoint it began with, where they exist."""

LICENCE_KEYS = ("license", "license_name", "license_link")
"""Lines of a model card's head that hold for a model trained from it."""


def copy_companions(source: str, target: Path, dtype: str, origin: str = "") -> None:
    """config.json (with the dtype that is written), tokenizer, templates and generation config, from the checkpoint of the
    start; a model card that says where the weights come from (``origin``, a sentence)."""
    raw = read_json(Path(source, "config.json"))
    raw["dtype" if "dtype" in raw else "torch_dtype"] = dtype
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for pattern in COPIED:
        for path in Path(source).glob(pattern):
            if path.is_file():
                place = target / path.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                shutil.copy(path, place)
    (target / "README.md").write_text(model_card(source, raw.get("_name_or_path"), origin), encoding="utf-8")


def model_card(source: str, name: object, origin: str) -> str:
    """README.md of an export. A hub reads its head; the licence is the one of the source's card, or none is named."""
    base = name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else Path(source).resolve().name
    head = [
        "library_name: transformers",
        "tags: [dapo, reinforcement-learning]",
        *_licence_lines(Path(source, "README.md")),
    ]
    if "/" in base:
        head.insert(0, f"base_model: {base}")
    text = f"{base}, trained with DAPO by megatron-dapo. {origin}".strip()
    return "---\n" + "\n".join(head) + f"\n---\n\n{text}\n"


def _licence_lines(card: Path) -> list[str]:
    if not card.is_file():
        return []
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (line.strip() for line in lines[1:]):
        return []
    head = lines[1 : 1 + [line.strip() for line in lines[1:]].index("---")]
    return [line for line in head if line.partition(":")[0] in LICENCE_KEYS]
