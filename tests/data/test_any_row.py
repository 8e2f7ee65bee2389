"""Whatever a row holds: a prompt that can be trained on, or one line that names the row."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
from chat_tokenizers import CHATML, LLAMA, tokenizer_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.config import DataOptions
from megatron_dapo.data.prompts import load_prompts
from megatron_dapo.types import InputError

TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "a\nb", "<s>", "<|im_end|>", "#### 7", "[{", "\x00", "x" * 60, "\ud800", "\\ud800", "\ufeff"]
    ),
    st.text(st.characters(codec=None), max_size=8),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image", None, 1]), "text": VALUES})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "system", "assistant", "tool", "", None, 1, "other"]) | VALUES,
            "content": TEXTS | st.lists(PARTS, max_size=2) | VALUES,
            "name": VALUES,
            "tool_calls": VALUES,
        },
    ),
    max_size=3,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": TEXTS | MESSAGES | VALUES,
        "question": TEXTS,
        "answer": st.sampled_from(["7", 7]) | VALUES,
        "reward_model": st.fixed_dictionaries({"ground_truth": VALUES}) | VALUES,
        "data_source": st.none() | VALUES,
        "extra_info": st.dictionaries(TEXTS, VALUES, max_size=2) | VALUES,
        "metadata": st.fixed_dictionaries({"source_dataset": VALUES}),
        "tools": st.none() | VALUES,
        "chat_template_kwargs": st.none() | VALUES,
        "system": st.none() | TEXTS,
    },
)
GOOD = {"prompt": "1+1", "answer": "2"}


def refused_in_one_line(error: InputError, path: str) -> bool:
    line = str(error)
    line.encode(errors="backslashreplace")
    return line.startswith(path) and len(line.splitlines()) == 1 and len(line) < len(path) * 3 + 700


@pytest.mark.parametrize("overflow", ["error", "drop", "truncate"])
@pytest.mark.parametrize("template", [None, CHATML, LLAMA])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(row=ROWS, apply=st.sampled_from([None, False]), dedup=st.booleans())
def test_a_row_is_a_prompt_or_a_line(tmp_path, template, overflow, row, apply, dedup):
    folder = tmp_path / "tokenizer"
    tokenizer = CACHE.setdefault(template, None) or tokenizer_with(folder, template, opening=True)
    CACHE[template] = tokenizer
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (GOOD, row)))
    options = DataOptions(
        prompt_template="none", rollout_max_prompt_len=40, prompt_overflow=overflow, dedup_prompts=dedup,
        apply_chat_template=apply, answer_type="any",
    )  # fmt: skip
    said: list[str] = []
    try:
        prompts = load_prompts([str(path)], options, tokenizer, note=said.append)
    except InputError as error:
        assert refused_in_one_line(error, str(path)), error
        return
    assert len(said) == 1 and len(said[0].splitlines()) == 1
    assert 1 <= len(prompts) <= 2
    for prompt in prompts:
        fields: dict[str, Any] = asdict(prompt)
        json.dumps(fields, ensure_ascii=False).encode()
        assert pickle.loads(pickle.dumps(fields)).keys() == fields.keys()
        assert 1 <= len(prompt.token_ids) <= 40 and prompt.answer.strip() and prompt.text.strip()
        assert max(prompt.token_ids) < tokenizer.vocab_size


CACHE: dict[str | None, Any] = {}
"""A tokenizer per template, for all examples."""
