"""Tokenizers: characters round trip, Qwen's real one, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.data.tokenizer import load_tokenizer, write_character_tokenizer
from megatron_dapo.types import InputError

QWEN = Path(__file__).parents[3] / "shared/data/tokenizers/qwen2.5"
ALPHABET = "0123456789+-= :;\nAnswer"


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(folder, "".join(dict.fromkeys(ALPHABET)))
    return load_tokenizer(str(folder))


@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_characters_round_trip_exactly(characters, text):
    ids = characters.encode(text)
    assert len(ids) == len(text) and characters.decode(ids) == text
    assert all(3 <= i < characters.vocab_size for i in ids)


def test_special_ids_of_the_character_tokenizer(characters):
    assert characters.vocab_size == len(set(ALPHABET)) + 3
    assert characters.stop_token_ids == (1,)
    assert characters.encode("?") == [2]
    assert characters.decode([*characters.encode("1+1"), 1]) == "1+1"
    assert characters.decode([1], skip_special_tokens=False) == "<eos>"


def test_ids_without_a_token_are_counted(characters):
    ids = np.array([0, 1, 2, 3, characters.vocab_size - 1, characters.vocab_size, 10**6, -1])
    assert characters.unknown(ids) == 3 and characters.unknown(ids[:0]) == 0


def test_ids_without_a_token_lie_also_between_those_that_have_one(tmp_path):
    write_character_tokenizer(tmp_path, "ab")
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    written["model"]["vocab"] |= {"a": 7, "b": 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    assert load_tokenizer(str(tmp_path)).unknown(np.arange(10)) == 5  # 3 .. 6 and 8


@pytest.mark.skipif(not QWEN.is_dir(), reason="the Qwen tokenizer does not lie beside this checkout")
def test_qwens_embedding_has_rows_without_a_token():
    qwen = load_tokenizer(str(QWEN))
    assert qwen.unknown(np.arange(151936)) == 151936 - qwen.vocab_size > 0


def test_an_ordinary_word_that_looks_like_an_end_of_turn_ends_nothing(tmp_path):
    """Qwen's vocabulary has the word </s>, from HTML, beside its special tokens."""
    write_character_tokenizer(tmp_path, ALPHABET[:10])
    path = tmp_path / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["vocab"] |= {"</s>": 13, "<|im_end|>": 14}
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 14, "content": "<|im_end|>"})
    path.write_text(json.dumps(tree))
    assert load_tokenizer(str(tmp_path)).stop_token_ids == (1, 14)


def test_a_vocabulary_larger_than_the_models_is_refused(characters):
    characters.check_vocab(characters.vocab_size)
    with pytest.raises(InputError, match=f"has {characters.vocab_size} ids, the model only 10"):
        characters.check_vocab(10)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer\.json there"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not QWEN.exists(), reason="Qwen's tokenizer does not lie beside this checkout")
def test_qwen_stops_on_both_ends_and_chats_as_transformers_does():
    from transformers import AutoTokenizer

    tokenizer, theirs = load_tokenizer(str(QWEN)), AutoTokenizer.from_pretrained(QWEN)
    assert tokenizer.vocab_size == 151665
    named = {theirs.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>")}
    assert named <= set(tokenizer.stop_token_ids)
    messages = [{"role": "user", "content": "What is 1+1?"}]
    assert tokenizer.chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer.encode("Añswer: 3\n")) == "Añswer: 3\n"
