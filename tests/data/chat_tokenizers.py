"""Small tokenizers with what the real ones have: chat templates, begin- and end-of-text ids. One id per character."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"

CHATML = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role in ['system', 'user', 'assistant'] %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""As Qwen's: a default system prompt, other roles left out."""

LLAMA = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('System role must be first') }}{%- endif %}"
    "{{- '[' + m.role + ']' + m.content | trim }}{%- endfor %}{{- '[assistant]' }}"
)
"""As Llama 3's: it writes the begin-of-text id."""


def tokenizer_with(
    folder: Path, template: str | None = None, opening: bool = False, closing: bool = False, choose: str | None = None
) -> Tokenizer:
    """A tokenizer in ``folder``. ``opening`` and ``closing``: it puts ``<s>`` before and ``<eos>`` behind raw text."""
    write_character_tokenizer(folder, ALPHABET)
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tree, settings = json.loads(file.read_text()), json.loads(config.read_text())
    for token in ("<s>", "<|im_start|>", "<|im_end|>"):
        number = len(tree["model"]["vocab"])
        tree["model"]["vocab"][token] = number
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tree["added_tokens"].append({"id": number, "content": token, **flags})
    specials = [*(["<s>"] if opening else []), *(["<eos>"] if closing else [])]
    if specials:
        single = [{"SpecialToken": {"id": t, "type_id": 0}} for t in specials]
        single.insert(int(opening), {"Sequence": {"id": "A", "type_id": 0}})
        ids = {t: {"id": t, "ids": [tree["model"]["vocab"][t]], "tokens": [t]} for t in specials}
        tree["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": ids}
    settings |= {"bos_token": "<s>"} | ({"chat_template": template} if template else {})
    file.write_text(json.dumps(tree))
    config.write_text(json.dumps(settings))
    return load_tokenizer(str(folder), chat_template=choose)


SHARED = Path(__file__).parents[3] / "shared/data"


def qwen() -> Tokenizer:
    """The tokenizer of Qwen2.5, where it lies beside this checkout."""
    if not (SHARED / "tokenizers/qwen2.5").exists():
        pytest.skip("Qwen's tokenizer does not lie beside this checkout")
    return _qwen()


@functools.cache
def _qwen() -> Tokenizer:
    return load_tokenizer(str(SHARED / "tokenizers/qwen2.5"))
