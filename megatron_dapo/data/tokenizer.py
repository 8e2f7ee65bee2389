"""Text to token ids and back, by the tokenizer.json beside the model's weights."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.types import BoolArray, InputError, IntArray

END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Ids that end a response where a vocabulary has them: base models stop on the one, chat models on the other."""


class Tokenizer:
    """A thin face on a transformers tokenizer: ids in, ids out, nothing added that is not asked for."""

    def __init__(self, inner: Any, path: str) -> None:
        self._inner = inner
        self.path = path
        self.opening = _opening(inner)
        """Ids that this tokenizer puts in front of raw text: the begin-of-text id of Llama 3 and Mistral, none of Qwen."""

    @property
    def vocab_size(self) -> int:
        """Ids, added tokens included; the model's embedding has at least as many rows."""
        return len(self._inner)

    def unknown(self, ids: IntArray) -> int:
        """How many of ``ids`` have no token: rows that pad an embedding can be sampled, and decode to nothing."""
        inside = ids[(ids >= 0) & (ids < len(self._known))]
        return len(ids) - int(self._known[inside].sum())

    @functools.cached_property
    def _known(self) -> BoolArray:
        """By id, whether it has a token."""
        ids = list(self._inner.get_vocab().values())
        known = np.zeros(max(ids) + 1, dtype=np.bool_)
        known[ids] = True
        return known

    @property
    def end_of_text(self) -> int:
        """The id that closes a text.

        Raises:
            InputError: the tokenizer names none.
        """
        if self._inner.eos_token_id is None:
            raise InputError(f"the tokenizer in {self.path} has no eos_token; name one in its tokenizer_config.json")
        return int(self._inner.eos_token_id)

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for what the vocabulary lacks, where there is one."""
        unknown: int | None = self._inner.unk_token_id
        return unknown

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End of text, and the end-of-turn tokens that exist. Ordinary words that look like one (``</s>`` of Qwen's vocabulary,
        which ends a line of HTML) end nothing."""
        known = self._inner.get_added_vocab()
        ids = {known[token] for token in END_OF_TURN if token in known}
        if self._inner.eos_token_id is not None:
            ids.add(int(self._inner.eos_token_id))
        return tuple(sorted(ids))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without a begin- or end-of-text token."""
        return list(self._inner.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def encode_raw(self, text: str) -> list[int]:
        """Ids of raw text as a prompt: as the tokenizer does it, with its begin-of-text id (one, also where ``text`` spells
        it out already), but never with an end-of-text id, behind which nothing is left to say."""
        ids = self.encode(text)
        return ids if self.opens(ids) else [*self.opening, *ids]

    def opens(self, ids: Sequence[int]) -> bool:
        """True where ``ids`` begin as raw text of this tokenizer does."""
        return tuple(ids[: len(self.opening)]) == self.opening

    def chat_template(self, tools: bool = False) -> str | None:
        """The chat template; of several the default one, or with ``tools`` the one for tool use. None: there is none.

        Raises:
            InputError: there are several, and none of them is the default.
        """
        if not self._inner.chat_template:
            return None
        try:
            return str(self._inner.get_chat_template(None, [{}] if tools else None))
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"the tokenizer in {self.path}: {reason}; name one with --chat-template") from None

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **keywords: Any) -> str:
        """``messages`` through the chat template, up to where the assistant speaks; ``keywords`` are the template's own.
        Whatever the template raises comes through."""
        text: str = self._inner.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **keywords
        )
        return text

    def check_vocab(self, model_vocab_size: int) -> None:
        """Refuse a tokenizer with ids that the model has no embedding for."""
        if self.vocab_size > model_vocab_size:
            raise InputError(
                f"the tokenizer in {self.path} has {self.vocab_size} ids, the model only {model_vocab_size} (--vocab-size); "
                "use the model's own tokenizer"
            )


def _opening(inner: Any) -> tuple[int, ...]:
    """What ``inner`` adds in front of a text."""
    text = "1"
    bare, whole = (inner.encode(text, add_special_tokens=special) for special in (False, True))
    added = len(whole) - len(bare)
    before = next((i for i in range(added + 1) if whole[i : i + len(bare)] == bare), 0)
    return tuple(whole[:before])


def load_tokenizer(path: str, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a local folder; no hub is ever asked. ``chat_template`` stands for the tokenizer's own: a file, the
    name of one of the tokenizer's templates, or the template itself.

    Raises:
        InputError: the folder or its tokenizer.json is missing or not readable, or there is no such template.
    """
    if not Path(path, "tokenizer.json").is_file():
        raise InputError(f"--tokenizer-model {path}: no tokenizer.json there; give the folder of the model's tokenizer")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        inner = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer = Tokenizer(inner, path)
    except Exception as error:  # whatever is wrong with the files, the user has to fix them
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--tokenizer-model {path}: cannot be read: {reason}") from error
    if chat_template is not None:
        inner.chat_template = _template(chat_template, inner.chat_template)
    return tokenizer


def _template(given: str, own: Any) -> str:
    """The template that ``--chat-template`` names."""
    if isinstance(own, dict) and given in own:
        return str(own[given])
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"{error.strerror}" if isinstance(error, OSError) else "no UTF-8 text"
        names = f", or one of the tokenizer's: {', '.join(own)}" if isinstance(own, dict) else ""
        raise InputError(
            f"--chat-template {' '.join(given.split()):.80}: {reason}; give a file, or the template itself{names}"
        ) from None


def write_character_tokenizer(folder: str | Path, alphabet: str) -> None:
    """Write a tokenizer with one id a character of ``alphabet``: <pad> 0, <eos> 1, <unk> 2, then the characters in order."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    assert len(set(alphabet)) == len(alphabet), "a character stands twice in the alphabet"
    specials = ["<pad>", "<eos>", "<unk>"]
    vocab = {token: number for number, token in enumerate([*specials, *alphabet])}
    fast = Fast(models.WordLevel(vocab, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(specials)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
