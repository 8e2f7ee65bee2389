"""Prompts of any length: what is kept, and that a text far too long is not tokenised whole."""

from __future__ import annotations

import json
import random

import pytest
from chat_tokenizers import CHATML, qwen, tokenizer_with

from megatron_dapo.config import DataOptions
from megatron_dapo.data.length import fit, last_tokens, sure_to_exceed
from megatron_dapo.data.prompts import load_prompts
from megatron_dapo.data.rows import RowError
from megatron_dapo.types import InputError


class Counting:
    """Counts the characters that are tokenised."""

    def __init__(self, encode):
        self.encode, self.seen = encode, 0

    def __call__(self, text):
        self.seen += len(text)
        return self.encode(text)


@pytest.mark.parametrize("overflow", ["error", "drop", "truncate"])
@pytest.mark.parametrize("template", [None, CHATML])
def test_a_row_of_megabytes_costs_what_its_limit_costs(tmp_path, monkeypatch, overflow, template):
    tokenizer = tokenizer_with(tmp_path, template, opening=True)
    counting = Counting(tokenizer.encode)
    monkeypatch.setattr(tokenizer, "encode", counting)
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "ab" * 1_500_000 + "end", "answer": "1"}, {"question": "short", "answer": "1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = DataOptions(rollout_max_prompt_len=100, prompt_overflow=overflow, prompt_template="none")
    if overflow == "error":
        with pytest.raises(InputError, match="row 1: its prompt has 30000.. characters, far more than"):
            load_prompts([str(path)], options, tokenizer)
    else:
        prompts = load_prompts([str(path)], options, tokenizer)
        assert "short" in prompts[-1].text and len(prompts) == (1 if overflow == "drop" else 2)
    if overflow == "truncate":
        ids = prompts[0].token_ids
        end = tokenizer.decode(ids, skip_special_tokens=False)
        assert len(ids) == 100 and prompts[0].text.endswith(end.removeprefix("<s>"))
        assert end.startswith("<s>") == (template is None)
    assert counting.seen < 100_000


def test_a_text_is_too_long_only_where_it_is():
    """Tokens of any length: a text of many characters and few tokens fits."""
    one_token_each_1000 = Counting(lambda text: [0] * (len(text) // 1000))
    assert not sure_to_exceed(one_token_each_1000, "x" * 100_000, 100)
    assert sure_to_exceed(lambda text: list(map(ord, text)), "x" * 100_000, 100)


def test_the_end_of_a_long_text_is_that_of_the_whole_where_the_place_of_the_cut_matters():
    """Pairs are counted from the left, so an odd cut shifts them all: ends that disagree are not believed."""

    def pairs(text):
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    text = "".join(random.Random(0).choices("abc", k=20_001))
    assert last_tokens(pairs, text, 50) == pairs(text)[-50:]
    words = Counting(lambda text: [hash(w) for w in text.split()])
    text = " ".join(random.Random(1).choices(["ab", "cde", "f"], k=20_000))
    assert last_tokens(words, text, 50) == words.encode(text)[-50:] and words.seen < len(text)


@pytest.mark.parametrize("limit", [7, 64])
def test_the_end_of_long_texts_with_a_real_tokenizer(limit):
    tokenizer, rng = qwen(), random.Random(limit)
    letters = "".join(rng.choices("ab \n1234567\u00e9\u4f60.", k=20_000))
    words = " ".join(rng.choices(["Tri", "angle", "equals", "(x+1)", "\n\n", "0.125", "\u00e9t\u00e9"], k=10_000))
    for text in (letters, words, "a" * 12_001, "\n" * 12_003, "12345" * 4_001):
        for overflow in ("truncate", "drop"):
            wanted = tokenizer.encode(text)[-limit:] if overflow == "truncate" else None
            assert fit(tokenizer, text, True, limit, overflow) == (wanted, True)


def test_millions_of_spaces_are_refused_not_tokenised_whole():
    text = " " * 5_000_000 + "x"
    with pytest.raises(RowError, match="500000. characters, whose end has no tokens of its own"):
        fit(qwen(), text, True, 64, "truncate")
    assert fit(qwen(), text, True, 64, "drop") == (None, True)


@pytest.mark.parametrize("length", [1, 9, 10, 11, 50])
def test_the_limit_itself_fits(tmp_path, length):
    tokenizer = tokenizer_with(tmp_path)
    text = "x" * length
    if length <= 10:
        assert fit(tokenizer, text, True, 10, "error") == (tokenizer.encode(text), False)
    else:
        with pytest.raises(RowError, match=f"has {length} tokens, --rollout-max-prompt-len is 10"):
            fit(tokenizer, text, True, 10, "error")
        assert fit(tokenizer, text, True, 10, "drop") == (None, True)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_with_hardly_room_for_the_begin_of_text(tmp_path, limit):
    tokenizer = tokenizer_with(tmp_path, opening=True)
    ids, cut = fit(tokenizer, "abcdef", True, limit, "truncate")
    assert cut and ids == (tokenizer.encode("f") if limit == 1 else tokenizer.encode("<s>" + "abcdef"[-limit + 1 :]))
