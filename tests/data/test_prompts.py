"""Rows to prompts, and the cursor over them: real files where they lie beside the checkout, hand-written ones always."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import qwen
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config import DataOptions
from megatron_dapo.data.labels import comparable
from megatron_dapo.data.prompts import DAPO_TEMPLATE, PromptCursor, load_eval_prompts, load_prompts
from megatron_dapo.data.rows import read_rows
from megatron_dapo.data.tokenizer import load_tokenizer, write_character_tokenizer
from megatron_dapo.types import InputError, Prompt

SHARED = Path(__file__).parents[3] / "shared/data"
DAPO_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": "abc"},
}
RAW = DataOptions(apply_chat_template=False)
"""For rows of one user message, with a tokenizer without a chat template."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder, "".join(map(chr, range(32, 127))) + "\n")
    return load_tokenizer(str(folder))


def shared(path: str) -> str:
    if not (SHARED / path).exists():
        pytest.skip(f"{path} does not lie beside this checkout")
    return str(SHARED / path)


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_dapo_rows_are_taken_as_they_are(tmp_path, tokenizer):
    (prompt,) = load_prompts([jsonl(tmp_path, DAPO_ROW)], RAW, tokenizer)
    assert (prompt.text, prompt.answer, prompt.data_source) == ("What is 1 + 1?", "2", "math_dapo")
    assert prompt.uid == "math_dapo:abc" and prompt.extra == {"index": "abc"}
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_plain_rows_go_into_the_dapo_template(tmp_path, tokenizer):
    row = {"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7 apples.\n#### 7"}
    (prompt,) = load_prompts([jsonl(tmp_path, row)], DataOptions(), tokenizer)
    assert prompt.answer == "7" and prompt.text == DAPO_TEMPLATE.replace("{problem}", "How many?")
    assert "Answer: $Answer (without quotes)" in prompt.text and prompt.text.endswith('after "Answer:".')


def test_columns_templates_and_patterns_can_be_named(tmp_path, tokenizer):
    row = {"q": {"text": "1{1}?"}, "meta": {"gold": "so it is [42]"}}
    options = DataOptions(
        input_key="q.text", label_key="meta.gold", label_regex=r"\[(\d+)\]", prompt_template="Q: {problem} A:"
    )
    (prompt,) = load_prompts([jsonl(tmp_path, row)], options, tokenizer)
    assert (prompt.text, prompt.answer) == ("Q: 1{1}? A:", "42")


def test_numbers_as_answers_become_text(tmp_path, tokenizer):
    rows = [{"question": str(i), "answer": value} for i, value in enumerate([7, 7.5, "025"])]
    assert [p.answer for p in load_prompts([jsonl(tmp_path, *rows)], DataOptions(), tokenizer)] == ["7", "7.5", "025"]


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (72.0, "72"),
        (-0.5, "-0.5"),
        (0, "0"),
        (10**30, "1" + 30 * "0"),
        ("72.0", "72.0"),
        (" 7\n", "7"),
        (True, None),
        ([], None),
        (["7"], None),
        ({"value": 2}, None),
        (float("nan"), None),
        (float("inf"), None),
        ("  ", None),
        ("#### ", None),
    ],
)
def test_a_label_is_a_text_or_a_number(tmp_path, tokenizer, label, answer):
    path = jsonl(tmp_path, {"question": "q", "answer": label})
    if answer is not None:
        assert load_prompts([path], DataOptions(answer_type="any"), tokenizer)[0].answer == answer
        return
    with pytest.raises(InputError, match="rows.jsonl row 1: its answer is"):
        load_prompts([path], DataOptions(answer_type="any"), tokenizer)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2", "2.0", True),
        ("2", "4/2", True),
        ("-07", "-7", True),
        ("1" * 30, "1" * 29 + "2", False),
        ("1,2", "12", False),
        ("1e3", "1000", False),
        ("1/0", "1", False),
        ("x", "X", False),
    ],
)
def test_answers_that_are_the_same_number_are_the_same(one, other, same):
    assert (comparable(one) == comparable(other)) is same


def test_characters_that_the_tokenizer_does_not_know_are_said(tmp_path, tokenizer):
    said = []
    rows = [{"question": q, "answer": "1"} for q in ("a\u4f60b", "plain")]
    load_prompts([jsonl(tmp_path, *rows)], DataOptions(), tokenizer, note=said.append)
    assert "1 prompts hold characters that the tokenizer does not know" in said[0]


class PanicException(BaseException):
    """As pyo3 names it: no Exception."""


@pytest.mark.parametrize("error", [Exception, PanicException])
def test_a_tokenizer_that_cannot_read_a_prompt_is_one_line(tmp_path, tokenizer, monkeypatch, error):
    def fails(text: str) -> list[int]:
        raise error("WordLevel error: Missing [UNK] token from the vocabulary")  # as tokenizers raises it

    monkeypatch.setattr(tokenizer, "encode", fails)
    path = jsonl(tmp_path, {"question": "q", "answer": "1"})
    with pytest.raises(InputError, match="row 1: the tokenizer cannot read its prompt: WordLevel error"):
        load_prompts([path], DataOptions(), tokenizer)


def test_an_element_of_a_list_can_be_named(tmp_path, tokenizer):
    path = jsonl(tmp_path, {"question": "q", "reward_model": {"ground_truth": ["34", "x"]}, "a.b": "5"})
    with pytest.raises(InputError, match="a list of 2; name one element"):
        load_prompts([path], DataOptions(), tokenizer)
    assert load_prompts([path], DataOptions(label_key="reward_model.ground_truth.0"), tokenizer)[0].answer == "34"
    assert load_prompts([path], DataOptions(label_key="a.b"), tokenizer)[0].answer == "5"


def test_only_the_answers_of_checked_sources_are_checked(tmp_path, tokenizer):
    gym = {"question": "1", "answer": "none", "metadata": {"source_dataset": "coin_flip"}}
    path = jsonl(tmp_path, {"question": "2", "answer": "5"}, gym)
    options = DataOptions(answer_type="any")

    def check(answer):
        return None if answer == "5" else "it is not 5"

    prompts = load_prompts(
        [path], options, tokenizer, check, is_checked=lambda source: not source.startswith("reasoning_gym/")
    )
    assert [p.answer for p in prompts] == ["5", "none"]
    for load in (load_prompts, load_eval_prompts):
        with pytest.raises(InputError, match="row 2: answer 'none': it is not 5; fix the row or remove it"):
            load([path], options, tokenizer, check)


def test_reasoning_gym_rows_carry_their_entry(tmp_path, tokenizer):
    row = {"question": "1 + 1", "answer": "2", "metadata": {"source_dataset": "chain_sum", "difficulty": 1}}
    (prompt,) = load_prompts([jsonl(tmp_path, row)], DataOptions(), tokenizer)
    assert prompt.data_source == "reasoning_gym/chain_sum"
    assert prompt.extra == {"task": "chain_sum", "entry": row}


def test_duplicates_go_and_uids_stay_unique(tmp_path, tokenizer):
    other = {**DAPO_ROW, "prompt": [{"role": "user", "content": "Another"}]}
    rows = [DAPO_ROW, DAPO_ROW, other, {**DAPO_ROW, "reward_model": {"ground_truth": "3"}}]
    path = jsonl(tmp_path, *rows)
    kept = load_prompts([path], RAW, tokenizer)
    assert [p.answer for p in kept] == ["2", "2", "3"] and len({p.uid for p in kept}) == 3
    assert len({p.uid for p in load_prompts([path], replace(RAW, dedup_prompts=False), tokenizer)}) == 4


@pytest.mark.parametrize("times", [1, 2, 3, 5])
@pytest.mark.parametrize("repeated", [1, 2])
def test_a_file_counts_as_often_as_it_is_listed_where_duplicates_stay(tmp_path, tokenizer, times, repeated):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(3) for _ in range(repeated)]
    path = jsonl(tmp_path, *rows)
    prompts = load_prompts([path] * times, DataOptions(dedup_prompts=False), tokenizer)
    assert [p.answer for p in prompts] == [row["answer"] for row in rows] * times
    assert len({p.uid for p in prompts}) == len(prompts) == 3 * repeated * times
    assert len(load_prompts([path] * times, DataOptions(), tokenizer)) == 3


SAME_QUESTION = [
    {"question": "q1", "answer": "1"},
    {"question": "q2", "answer": "2"},
    {"question": "q1", "answer": "1.0"},  # the same number: a duplicate
    {"question": "q1", "answer": "3"},
    {"question": "q2", "answer": "2"},
]


@pytest.mark.parametrize(("choice", "kept"), [("keep", ["1", "2", "3"]), ("drop", ["2"])])
def test_a_problem_with_two_answers_is_said_and_kept_or_dropped(tmp_path, tokenizer, choice, kept):
    path, said = jsonl(tmp_path, *SAME_QUESTION), []
    options = DataOptions(conflicting_answers=choice)
    assert [p.answer for p in load_prompts([path], options, tokenizer, note=said.append)] == kept
    assert f"5 rows, {len(kept)} prompts" in said[0] and "2 of 5 rows are duplicates" in said[0]
    assert f"1 problems with different answers {'kept' if choice == 'keep' else 'dropped'}" in said[0]
    assert f"{path} row 1 ('1') and {path} row 4 ('3')" in said[0]


def test_a_problem_with_two_answers_can_be_refused(tmp_path, tokenizer):
    path, options = jsonl(tmp_path, *SAME_QUESTION), DataOptions(conflicting_answers="error")
    with pytest.raises(
        InputError, match=f"row 4: the problem of {path} row 1, whose answer is '1', with the answer '3'"
    ):
        load_prompts([path], options, tokenizer)
    assert len(load_prompts([jsonl(tmp_path, *SAME_QUESTION[:3])], options, tokenizer)) == 2


def test_what_became_of_the_rows_is_said(tmp_path, tokenizer, capsys):
    rows = [{"question": "x" * n, "answer": "1"} for n in (5, 11, 12, 5, 11)]
    plain = {"rollout_max_prompt_len": 10, "prompt_template": "none"}
    path = jsonl(tmp_path, *rows)
    load_prompts([path], DataOptions(**plain, prompt_overflow="drop"), tokenizer)
    assert capsys.readouterr().out == (
        f"{path}: 5 rows, 1 prompts as raw text; 1 of 5 rows are duplicates; 3 of 5 rows dropped: longer than "
        f"--rollout-max-prompt-len 10 tokens (first: {path} row 2)\n"
    )
    load_prompts([path], DataOptions(**plain, prompt_overflow="truncate"), tokenizer)
    assert "2 of 5 prompts cut to their last 10 tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match="no prompt is left of 2 rows, 0 prompts as raw text; 2 of 2 rows dropped"):
        load_prompts([jsonl(tmp_path, *rows[1:3])], DataOptions(**plain, prompt_overflow="drop"), tokenizer)


def test_long_prompts_are_refused_dropped_or_cut_from_the_left(tmp_path, tokenizer):
    rows = [{"question": "x" * n, "answer": "1"} for n in (5, 10, 11)]
    path, plain = jsonl(tmp_path, *rows), {"rollout_max_prompt_len": 10, "prompt_template": "none"}
    with pytest.raises(InputError, match="row 3: its prompt has 11 tokens, --rollout-max-prompt-len is 10"):
        load_prompts([path], DataOptions(**plain), tokenizer)
    assert len(load_prompts([path], DataOptions(**plain, prompt_overflow="drop"), tokenizer)) == 2
    rows[2]["question"] = "abcdefghijk"
    cut = load_prompts([jsonl(tmp_path, *rows)], DataOptions(**plain, prompt_overflow="truncate"), tokenizer)[2]
    assert tokenizer.decode(cut.token_ids) == "bcdefghijk"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{"], "row 1: not JSON"),
        (["[1]"], "row 1: list instead of a JSON object"),
        ([], "no rows in it"),
        (
            [{"answer": "1"}],
            "no 'prompt' or 'question' or 'problem' in it (it has answer); name the column with --input-key",
        ),
        ([{"question": "q", "answer": None}], "--label-key"),
        ([{"question": "q", "answer": "#### "}], "its answer is empty"),
        ([{"question": ["no", "messages"], "answer": "1"}], "neither text nor a list of chat messages"),
        ([{"question": "q", "answer": "x"}], "answer 'x': not a number"),
        ([{"question": "q", "answer": "7" * 5000}], "cannot be read (ValueError)"),
        ([{"question": "", "answer": "1"}], "its prompt is empty"),
        ([{"question": " \n\t", "answer": "1"}], "its prompt is empty"),
        ([{"question": 3, "answer": "1"}], "neither text nor a list of chat messages"),
        ([{"question": {}, "answer": "1"}], "neither text nor a list of chat messages"),
        ([{"question": json.dumps(DAPO_ROW["prompt"]), "answer": "1"}], "messages written as text"),
        ([{"question": "a\ud800b", "answer": "1"}], "its prompt holds \\ud800, half of a character"),
        ([{"question": "q", "answer": "1", "data_source": "\udfff"}], "'data_source' is '\\udfff'"),
        ([{"question": "q", "answer": "1", "data_source": 3}], "'data_source' is 3, not one line of text"),
        ([{"question": "q", "answer": "1", "data_source": "a\nb"}], "not one line of text"),
        ([{"question": "q", "answer": "1", "data_source": ["a"]}], "not one line of text"),
        ([{"question": "q", "answer": "1", "extra_info": "x"}], "'extra_info' is text, not an object"),
        ([{"question": "q", "answer": "1", "extra_info": [1]}], "'extra_info' is a list, not an object"),
        ([{"question": "q", "answer": "1", "extra_info": {"a": ["\udc00"]}}], "its extra_info holds \\udc00"),
        ([{"question": "q", "answer": "1", "extra_info": {"index": "\udc00"}}], "its extra_info holds \\udc00"),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, rows, words):
    def number(answer: str) -> str | None:
        return None if str(int(answer) if answer.isdigit() else "").isdigit() else "not a number"

    with pytest.raises(InputError) as caught:
        load_prompts([jsonl(tmp_path, *rows)], DataOptions(), tokenizer, number)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_bad_files_and_templates_are_named(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"absent\.jsonl: no such file"):
        load_prompts([str(tmp_path / "absent.jsonl")], DataOptions(), tokenizer)
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(InputError, match=r"x\.csv: unknown kind"):
        load_prompts([str(tmp_path / "x.csv")], DataOptions(), tokenizer)
    (tmp_path / "x.parquet").write_text("not parquet at all")
    with pytest.raises(InputError, match=r"x\.parquet: not a whole parquet file"):
        load_prompts([str(tmp_path / "x.parquet")], DataOptions(), tokenizer)
    path = jsonl(tmp_path, {"question": "q", "answer": "1"})
    with pytest.raises(InputError, match=r"no \{problem\} in it"):
        load_prompts([path], DataOptions(prompt_template="Q:"), tokenizer)
    with pytest.raises(InputError, match="--label-regex"):
        load_prompts([path], DataOptions(label_regex="z(.)"), tokenizer)
    for pattern in ("(", "[a-", "*", "(?P<a"):
        with pytest.raises(InputError, match="not a regular expression"):
            load_prompts([path], DataOptions(label_regex=pattern), tokenizer)
    with pytest.raises(InputError, match="its answer is empty"):
        load_prompts([path], DataOptions(label_regex="1(z)?"), tokenizer)


def test_the_three_kinds_of_files_give_the_same(tmp_path, tokenizer):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]
    plain = jsonl(tmp_path, *rows)
    zipped, table = str(tmp_path / "rows.jsonl.gz"), str(tmp_path / "rows.parquet")
    with gzip.open(zipped, "wt") as file:
        file.write(Path(plain).read_text())
    pq.write_table(pa.Table.from_pylist(rows), table)
    first, second, third = ([r.fields for r in read_rows(p)] for p in (plain, zipped, table))
    assert first == second == third == rows


def test_repeated_evaluation_files_are_folded():
    tokenizer = qwen()
    prompts = load_eval_prompts([shared("math/aime-2024.parquet")], DataOptions(), tokenizer)
    assert len(prompts) == 30 and all(p.answer.isdigit() for p in prompts)


def test_evaluation_has_each_problem_once_whatever_training_does_with_duplicates(tmp_path, tokenizer):
    path = jsonl(tmp_path, *[{"question": f"q{i % 2}", "answer": "1"} for i in range(6)])
    keeps = DataOptions(dedup_prompts=False)
    assert len(load_prompts([path], keeps, tokenizer)) == 6 and len(load_eval_prompts([path], keeps, tokenizer)) == 2


def test_real_files_load_whole():
    tokenizer = qwen()
    gsm8k = load_prompts([shared("gsm8k/test.jsonl")], DataOptions(), tokenizer)
    assert len(gsm8k) == 1319 and gsm8k[0].answer == "18"
    dapo = load_prompts([shared("math/dapo-math-17k.first15.jsonl")], DataOptions(), tokenizer)
    assert len(dapo) == 15 and dapo[0].answer == "34" and "Solve the following math problem" in dapo[0].text
    assert len(load_prompts([shared("math/deepmath_1500.jsonl")], DataOptions(), tokenizer)) > 1400


PROMPTS = [Prompt(str(i), "", (), "", "") for i in range(7)]


@given(st.lists(st.integers(0, 20), max_size=8), st.booleans(), st.integers(0, 5))
def test_taking_in_parts_is_taking_at_once(parts, shuffle, seed):
    whole = [p.uid for p in PromptCursor(PROMPTS, seed, shuffle).take(sum(parts))]
    cursor, taken = PromptCursor(PROMPTS, seed, shuffle), []
    for n in parts:  # every part by a cursor that was resumed from the state before
        state = json.loads(json.dumps(cursor.state_dict()))
        cursor = PromptCursor(PROMPTS, seed, shuffle)
        cursor.load_state_dict(state)
        part = [p.uid for p in cursor.take(n)]
        assert len(part) == n
        taken += part
    assert taken == whole


def test_every_epoch_has_every_prompt_in_an_order_of_its_own():
    cursor = PromptCursor(PROMPTS, 3)
    epochs = [[p.uid for p in cursor.take(7)] for _ in range(3)]
    assert all(sorted(epoch) == list("0123456") for epoch in epochs) and len({tuple(e) for e in epochs}) == 3
    assert [p.uid for p in PromptCursor(PROMPTS, 3, shuffle=False).take(9)] == list("012345601")


def test_a_resume_over_other_prompts_is_refused():
    with pytest.raises(InputError, match="--prompt-data"):
        PromptCursor(PROMPTS[:6], 3).load_state_dict(PromptCursor(PROMPTS, 3).state_dict())
