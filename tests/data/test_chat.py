"""What the policy is given: each recipe's prompts as the released pipeline renders them, chat rows of every kind, begin-of-text
ids; and nothing that a row carries lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, LLAMA, SHARED, qwen, tokenizer_with

from megatron_dapo.config import DataOptions
from megatron_dapo.config.recipe import read_recipe
from megatron_dapo.data.prompts import load_eval_prompts, load_prompts
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.types import InputError, Prompt

ROOT = Path(__file__).parents[2]
ENDOFTEXT, IM_START, IM_END = 151643, 151644, 151645
USER = {"role": "user", "content": "Tell me of a boy."}
SYSTEM = {"role": "system", "content": "You are a kind story teller."}


def one(folder: Path, tokenizer: Tokenizer, prompt: Any, row: dict[str, Any] | None = None, **options: Any) -> Prompt:
    """The prompt of a single row."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "1", **(row or {})}) + "\n")
    (made,) = load_prompts([str(path)], DataOptions(**options), tokenizer)
    return made


def refused(folder: Path, tokenizer: Tokenizer, prompt: Any, row: dict[str, Any] | None = None, **options: Any) -> str:
    """The line with which a single row is refused."""
    with pytest.raises(InputError) as caught:
        one(folder, tokenizer, prompt, row, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def data_options(recipe: str) -> DataOptions:
    given = read_recipe(ROOT / f"examples/{recipe}.toml")
    return DataOptions(**{k: v for k, v in given.items() if k in DataOptions.__dataclass_fields__})


# --- the recipes, as released -----------------------------------------------------------------------------------

QUESTION = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
BEFORE = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
SQUARE = (
    "Let $ABCD$ be a unit square in the plane. Points $X$ and $Y$ are chosen independently and uniformly at random on the "
    "perimeter of $ABCD$. If the expected value of the area of triangle $\\triangle AXY$ can be expressed as $\\frac{m}{n}$ for "
    "relatively prime positive integers $m$ and $n$, compute $m+n$."
)
DUCKS = (
    "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends every "
    "day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. How much in dollars does "
    "she make every day at the farmers' market?"
)


@pytest.mark.parametrize(
    ("recipe", "file", "row", "problem"),
    [
        ("dapo_qwen32b", "math/dapo-math-17k.first15.jsonl", 1, SQUARE),
        ("dapo_qwen32b_verl", "math/dapo-math-17k.first15.jsonl", 1, SQUARE),
        ("dapo_qwen7b", "math/dapo-math-17k.first15.jsonl", 1, SQUARE),
        ("gsm8k_qwen0.5b", "gsm8k/test.jsonl", 0, DUCKS),
    ],
)
def test_each_recipe_gives_the_policy_what_the_released_pipeline_gives_it(recipe, file, row, problem):
    """A row is one user turn of Qwen's chat: its default system prompt, the turn, and the assistant's header."""
    tokenizer = qwen()
    prompt = load_prompts([str(SHARED / file)], data_options(recipe), tokenizer)[row]
    assert prompt.text == BEFORE + QUESTION.replace("{problem}", problem) + AFTER
    system = [
        IM_START,
        8948,
        198,
        2610,
        525,
        1207,
        16948,
        11,
        3465,
        553,
        54364,
        14817,
        13,
        1446,
        525,
        264,
        10950,
        17847,
        13,
    ]
    assert list(prompt.token_ids[:24]) == [*system, IM_END, 198, IM_START, 872, 198]
    assert list(prompt.token_ids[-5:]) == [IM_END, 198, IM_START, 77091, 198]
    assert prompt.token_ids.count(IM_START) == 3 and prompt.token_ids.count(IM_END) == 2
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
    assert list(prompt.token_ids) == tokenizer.encode(BEFORE) + tokenizer.encode(prompt.text[len(BEFORE) :])
    assert tokenizer.stop_token_ids == (ENDOFTEXT, IM_END)


def test_every_row_has_the_ids_that_transformers_gives_it():
    tokenizer, path = qwen(), SHARED / "math/dapo-math-17k.first15.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    theirs = [
        tokenizer._inner.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows
    ]
    assert [list(p.token_ids) for p in load_prompts([str(path)], data_options("dapo_qwen32b"), tokenizer)] == theirs


def test_an_evaluation_problem_of_the_main_recipe_is_one_user_turn_too():
    tokenizer = qwen()
    prompts = load_eval_prompts([str(SHARED / "math/aime-2024.parquet")], data_options("dapo_qwen32b"), tokenizer)
    assert len(prompts) == 30
    for prompt in prompts:
        assert prompt.text.startswith(BEFORE + QUESTION.split("{problem}")[0])
        assert prompt.text.endswith(QUESTION.split("{problem}")[1] + AFTER)


def test_a_row_of_the_data_sets_is_templated_by_default(tmp_path):
    tokenizer = tokenizer_with(tmp_path, CHATML)
    prompt = one(tmp_path, tokenizer, [USER])
    shown = "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nTell me of a boy.<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == shown
    start, end = (tokenizer.encode(t)[0] for t in ("<|im_start|>", "<|im_end|>"))
    assert prompt.token_ids[0] == start and prompt.token_ids.count(start) == 3 and prompt.token_ids.count(end) == 2
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == shown
    assert end in tokenizer.stop_token_ids
    both = one(tmp_path, tokenizer, [SYSTEM, USER]).text
    assert both.startswith(
        "<|im_start|>system\nYou are a kind story teller.<|im_end|>\n<|im_start|>user\nTell me of a boy."
    )


def test_a_plain_question_is_one_user_turn_where_there_is_a_template_unless_that_is_not_wanted(tmp_path):
    tokenizer = tokenizer_with(tmp_path, LLAMA)
    assert one(tmp_path, tokenizer, "1+1?", prompt_template="none").text == "<s>[user]1+1?[assistant]"
    assert one(tmp_path, tokenizer, "1+1?", prompt_template="none", apply_chat_template=False).text == "1+1?"
    assert one(tmp_path, tokenizer, [USER], apply_chat_template=False).text == "Tell me of a boy."


# --- what cannot be rendered is refused -------------------------------------------------------------------------


def test_messages_without_a_chat_template_are_never_glued_together(tmp_path):
    tokenizer = tokenizer_with(tmp_path)
    line = refused(tmp_path, tokenizer, [SYSTEM, USER])
    assert "rows.jsonl row 1: chat messages are for a chat template" in line and "--chat-template" in line
    assert "--no-apply-chat-template" in refused(tmp_path, tokenizer, [USER])
    assert "one user message" in refused(tmp_path, tokenizer, [SYSTEM, USER], apply_chat_template=False)
    assert "one user message" in refused(tmp_path, tokenizer, [{**USER, "name": "Ann"}], apply_chat_template=False)
    assert "has no chat template" in refused(tmp_path, tokenizer, [USER], apply_chat_template=True)
    assert "'tools'" in refused(tmp_path, tokenizer, "q", {"tools": [{"name": "f"}]})
    assert "'system'" in refused(tmp_path, tokenizer, "q", {"system": "Be brief."})


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "neither text nor a list of chat messages"),
        ([1], "message 1 is a number, not an object"),
        (["hello"], "message 1 is text"),
        ([SYSTEM, {"content": "x"}], "message 2 has no role"),
        ([{**USER, "role": None}], "message 1 has no role"),
        ([{**USER, "role": 3}], "the role of message 1 is 3, not a text"),
        ([{**USER, "role": ["user"]}], "the role of message 1 is ['user'], not a text"),
        ([{**USER, "role": " "}], "the role of message 1 is ' ', not a text"),
        ([{**USER, "role": "developer"}], "does not render message 1 (role 'developer')"),
        ([{**USER, "role": "developer", "content": "kind"}, USER], "does not render message 1 (role 'developer')"),
        ([{"role": "user"}], "the content of message 1 is null, not text"),
        ([{**USER, "content": None}], "the content of message 1 is null, not text"),
        ([{**USER, "content": 3}], "the content of message 1 is a number, not text"),
        ([{**USER, "content": True}], "the content of message 1 is true or false, not text"),
        ([{**USER, "content": {"text": "x"}}], "the content of message 1 is an object, not text"),
        ([{**USER, "content": ["x"]}], "part 1 of message 1 is 'x'"),
        ([{**USER, "content": [{"type": "image"}]}], "part 1 of message 1 is 'image'"),
        ([{**USER, "content": [{"type": "text", "text": None}]}], "part 1 of message 1"),
        ([{**USER, "content": [{"type": "text", "text": "x"}]}], "the chat template refuses it: can only concatenate"),
        ([{**USER, "content": []}], "the content of message 1 is a list, not text"),
        ([{**USER, "content": " \n"}], "the content of message 1 is empty"),
        ([{**USER, "name": "Ann"}], "does not render the key 'name' of a message; remove it, or set --unrendered-keys"),
        ([{**USER, "mood": {"good": 1}}], "does not render the key 'mood'"),
        ([USER, {"role": "tool", "content": "4", "tool_call_id": "a"}], "does not render message 2 (role 'tool')"),
        ([CALL, USER], "the chat template refuses it"),
        ([USER, {"role": "assistant", "content": "Once"}], "its last message is the assistant's"),
    ],
)
def test_messages_that_would_be_lost_or_garbled_are_refused(tmp_path, messages, words):
    line = refused(tmp_path, tokenizer_with(tmp_path, CHATML), messages)
    assert "rows.jsonl row 1: " in line and words in line


def test_a_list_of_parts_is_rendered_where_the_template_does_it_and_never_as_python_prints_it(tmp_path):
    message = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}
    joins = "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert one(tmp_path, tokenizer_with(tmp_path, joins), [message]).text == "user: a b"
    prints = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert "takes no list of parts" in refused(tmp_path, tokenizer_with(tmp_path, prints), [message])
    first = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }}{% endfor %}"
    assert "does not render message 1" in refused(tmp_path, tokenizer_with(tmp_path, first), [message])


EVERYTHING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}{{ '[think]' if enable_thinking else '[assistant]' }}"
)


def test_every_key_of_a_message_reaches_the_template_untouched(tmp_path):
    tokenizer = tokenizer_with(tmp_path, EVERYTHING)
    messages = [
        {**USER, "name": "Ann", "weight": None},
        {**CALL, "reasoning_content": "hm"},
        {"role": "tool", "content": "4", "name": "f", "tool_call_id": "c7"},
    ]
    assert one(tmp_path, tokenizer, messages).text == (
        "[user Ann]Tell me of a boy.[assistant]<hm>f({})[tool f]4#c7[assistant]"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = json.dumps(tools)
    for given in (tools, shown):  # parquet files hold it as text
        assert one(tmp_path, tokenizer, [USER], {"tools": given}).text == shown + "[user]Tell me of a boy.[assistant]"
    assert one(tmp_path, tokenizer, "q", {"system": "Be brief."}, prompt_template="none").text == (
        "[system]Be brief.[user]q[assistant]"
    )


def test_tools_of_a_parquet_file_have_their_own_keys_alone(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tools = [{"name": "f", "parameters": {"x": {"type": "int"}}}, {"name": "g", "parameters": {"y": {"enum": ["a"]}}}]
    calls = [
        {**CALL, "tool_calls": [{"function": {"name": n, "arguments": {k: 1}}}]} for n, k in (("f", "x"), ("g", "y"))
    ]
    row = {"prompt": [USER, *calls, {"role": "tool", "content": "4"}], "tools": tools, "answer": "1"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (prompt,) = load_prompts([str(tmp_path / "rows.parquet")], DataOptions(), tokenizer_with(tmp_path, EVERYTHING))
    assert prompt.text.startswith(json.dumps(tools)) and 'f({"x": 1})[assistant]g({"y": 1})[tool]4' in prompt.text


def test_parquet_nulls_are_absent_keys(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": [USER], "answer": "1"}, {"prompt": [{**USER, "name": "Ann"}], "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = load_prompts([str(tmp_path / "rows.parquet")], DataOptions(), tokenizer_with(tmp_path, EVERYTHING))
    assert [p.text for p in prompts] == ["[user]Tell me of a boy.[assistant]", "[user Ann]Tell me of a boy.[assistant]"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tools": "x"}, "'tools' is text that is no JSON"),
        ({"tools": {"a": 1}}, "'tools' is an object, not a list"),
        ({"tools": [1]}, "'tools' holds something else than objects"),
        ({"tools": [{"name": "f"}]}, "does not render the column 'tools'"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "does not read 'enable_thinking' (it reads no keywords)"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list, not an object"),
        ({"system": 3}, "'system' is no text"),
        ({"images": ["a.png"]}, "'images' cannot be given to a policy of text alone"),
    ],
)
def test_columns_beside_the_prompt_are_rendered_or_refused(tmp_path, row, words):
    tokenizer = tokenizer_with(tmp_path, CHATML)
    assert words in refused(tmp_path, tokenizer, [USER], row)
    assert one(tmp_path, tokenizer, [USER], dict.fromkeys(row)).text  # an empty one says nothing


def test_a_row_with_an_image_is_no_duplicate_of_one_without(tmp_path):
    path, row = tmp_path / "rows.jsonl", {"prompt": [USER], "answer": "1"}
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "images": ["a.png"]}) + "\n")
    with pytest.raises(InputError, match="row 2: its 'images' cannot be given"):
        load_prompts([str(path)], DataOptions(), tokenizer_with(tmp_path, CHATML))


def test_a_system_column_beside_a_system_message_is_ambiguous(tmp_path):
    line = refused(tmp_path, tokenizer_with(tmp_path, CHATML), [SYSTEM, USER], {"system": "Be brief."})
    assert "keep one" in line


def test_keys_that_are_not_rendered_can_be_ignored_and_are_counted(tmp_path, capsys):
    tokenizer = tokenizer_with(tmp_path, CHATML)
    assert one(tmp_path, tokenizer, [{**USER, "name": "Ann"}], unrendered_keys="ignore").text.count("Ann") == 0
    assert "the key 'name' of messages not rendered in 1 rows" in capsys.readouterr().out
    assert "role 'developer'" in refused(
        tmp_path, tokenizer, [{**USER, "role": "developer"}, USER], unrendered_keys="ignore"
    )


@pytest.mark.parametrize("second", [{**SYSTEM}, {"role": "system", "content": "x"}])
def test_a_template_that_refuses_a_role_is_one_line_with_the_row(tmp_path, second):
    line = refused(tmp_path, tokenizer_with(tmp_path, LLAMA), [USER, second])
    assert "rows.jsonl row 1: the chat template refuses it: System role must be first" in line


def test_a_template_may_shorten_a_message_but_not_to_nothing(tmp_path):
    """As Qwen3's forgets what was thought in earlier turns."""
    forgets = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}[assistant]"
    tokenizer = tokenizer_with(tmp_path, forgets)
    before = {"role": "assistant", "content": "<think>hm</think>Once"}
    assert one(tmp_path, tokenizer, [USER, before, USER]).text.count("[assistant]Once[user]") == 1
    line = refused(tmp_path, tokenizer, [USER, {**before, "content": "<think>hm</think>"}, USER])
    assert "does not render message 2 (role 'assistant')" in line


def test_a_later_row_of_the_same_shape_is_looked_at_as_well(tmp_path):
    """What a template reads is tried once per shape; a message that it drops by its content is still found."""
    picky = "{% for m in messages %}{% if m.content != 'skip' %}{{ m.content }}{% endif %}{% endfor %}:"
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "1"} for text in ("a", "b", "skip")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="row 3: the chat template does not render message 1"):
        load_prompts([str(path)], DataOptions(), tokenizer_with(tmp_path, picky))


# --- keywords and other templates -------------------------------------------------------------------------------


def test_thinking_can_be_switched_off(tmp_path):
    tokenizer = tokenizer_with(tmp_path, EVERYTHING)
    assert one(tmp_path, tokenizer, [USER], chat_template_kwargs='{"enable_thinking": true}').text.endswith("[think]")
    assert one(tmp_path, tokenizer, [USER], chat_template_kwargs='{"enable_thinking": false}').text.endswith(
        "[assistant]"
    )
    own = {"chat_template_kwargs": {"enable_thinking": False}}
    assert one(tmp_path, tokenizer, [USER], own, chat_template_kwargs='{"enable_thinking": true}').text.endswith(
        "[assistant]"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template_kwargs": "{"}, "not a JSON object"),
        ({"chat_template_kwargs": "[1]"}, "not a JSON object"),
        (
            {"chat_template_kwargs": '{"enable_thinkin": 1}'},
            "does not read 'enable_thinkin' (it reads enable_thinking)",
        ),
        ({"chat_template_kwargs": '{"messages": []}'}, "does not read 'messages'"),
        ({"chat_template_kwargs": '{"max_length": 1}'}, "does not read 'max_length'"),
        ({"chat_template_kwargs": '{"raise_exception": 1}'}, "does not read 'raise_exception'"),
        ({"chat_template_kwargs": '{"enable_thinking": 1}', "apply_chat_template": False}, "nothing reads them"),
    ],
)
def test_keywords_that_nothing_reads_are_refused(tmp_path, options, words):
    line = refused(tmp_path, tokenizer_with(tmp_path, EVERYTHING), [USER], **options)
    assert line.startswith("--chat-template-kwargs") and words in line


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% if think is defined and think is false %}off{% endif %}", True),
        ("{% if not think is defined %}{% set think = true %}{% endif %}{{ think }}", True),
        ("{% set think = think | default(true) %}{{ think }}", True),
        ("{% if not think %}{% set think = 'off' %}{% endif %}{{ think }}", True),
        ("{% macro m(x) %}{{ x }}{{ think }}{% endmacro %}{{ m(1) }}", True),
        ("{% set think = true %}{{ think }}", False),
        ("{% for think in messages %}{{ think.role }}{% endfor %}{{ messages[0].think }}", False),
        (
            "{% for m in messages %}{% set think = m.content %}{% if m.role and think %}{{ think }}{% endif %}{% endfor %}",
            False,
        ),
    ],
)
def test_what_a_template_sets_for_itself_is_no_keyword(tmp_path, template, reads):
    tokenizer = tokenizer_with(tmp_path, template + "{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {"chat_template_kwargs": '{"think": false}'}
    if reads:
        assert one(tmp_path, tokenizer, [USER], **options).text
    else:
        assert "does not read 'think'" in refused(tmp_path, tokenizer, [USER], **options)


def test_keywords_without_a_template_are_refused(tmp_path):
    line = refused(tmp_path, tokenizer_with(tmp_path), "q", chat_template_kwargs='{"enable_thinking": true}')
    assert "has no chat template" in line and "leave --chat-template-kwargs out" in line


def test_another_template_comes_from_a_file_or_stands_in_the_flag(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %} ->"
    (tmp_path / "own.jinja").write_text(template)
    for given in (template, str(tmp_path / "own.jinja")):
        tokenizer = tokenizer_with(tmp_path, CHATML, choose=given)
        assert one(tmp_path, tokenizer, [USER]).text == "Tell me of a boy. ->"
    with pytest.raises(InputError, match=r"--chat-template absent\.jinja: No such file") as caught:
        tokenizer_with(tmp_path, choose="absent.jinja")
    assert "\n" not in str(caught.value)
    (tmp_path / "own.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError, match="no UTF-8 text"):
        tokenizer_with(tmp_path, choose=str(tmp_path / "own.jinja"))


def test_of_several_templates_the_right_one_is_taken(tmp_path):
    tokenizer_with(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %} plain")
    (tmp_path / "additional_chat_templates").mkdir()
    use = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(use)
    tokenizer = load_tokenizer(str(tmp_path))
    assert one(tmp_path, tokenizer, [USER]).text == "Tell me of a boy. plain"
    row = {"tools": [{"name": "f"}], "chat_template_kwargs": {"mood": "!"}}
    assert one(tmp_path, tokenizer, [USER], row).text == '[{"name": "f"}]Tell me of a boy.!'
    chosen = load_tokenizer(str(tmp_path), chat_template="tool_use")
    assert one(tmp_path, chosen, [USER], chat_template_kwargs='{"mood": "?"}').text == "nullTell me of a boy.?"


def test_a_template_that_is_not_valid_is_named(tmp_path):
    assert "is not valid" in refused(tmp_path, tokenizer_with(tmp_path, "{% for m in %}"), [USER])


# --- begin- and end-of-text ids ---------------------------------------------------------------------------------


@pytest.mark.parametrize("closing", [False, True])
def test_raw_text_begins_as_the_tokenizer_begins_it_and_never_ends(tmp_path, closing):
    tokenizer = tokenizer_with(tmp_path, opening=True, closing=closing)
    begin, end = tokenizer.encode("<s>")[0], tokenizer.end_of_text
    prompt = one(tmp_path, tokenizer, "1+1?", prompt_template="none")
    theirs = tokenizer._inner.encode("1+1?")
    assert theirs == [begin, *tokenizer.encode("1+1?"), *([end] if closing else [])]
    assert list(prompt.token_ids) == [begin, *tokenizer.encode("1+1?")]
    spelled = one(tmp_path, tokenizer, "<s>1+1?", prompt_template="none")
    assert spelled.token_ids == prompt.token_ids


def test_a_tokenizer_that_only_appends_adds_nothing_in_front(tmp_path):
    tokenizer = tokenizer_with(tmp_path, closing=True)
    assert tokenizer.opening == ()
    assert list(one(tmp_path, tokenizer, "11", prompt_template="none").token_ids) == tokenizer.encode("11")


def test_a_template_writes_its_begin_of_text_itself(tmp_path):
    tokenizer = tokenizer_with(tmp_path, LLAMA, opening=True)
    begin = tokenizer.encode("<s>")[0]
    ids = one(tmp_path, tokenizer, [USER]).token_ids
    assert ids[0] == begin and ids.count(begin) == 1
    silent = tokenizer_with(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}:", opening=True)
    assert begin not in one(tmp_path, silent, [USER]).token_ids  # as transformers does it: the template decides


@pytest.mark.parametrize("template", [None, LLAMA])
def test_left_truncation_keeps_the_begin_of_text(tmp_path, template):
    tokenizer = tokenizer_with(tmp_path, template, opening=True)
    options = {"prompt_template": "none", "prompt_overflow": "truncate", "rollout_max_prompt_len": 5}
    prompt = one(tmp_path, tokenizer, "abcdefgh", **options)
    end = "efgh" if template is None else "ant]"
    assert list(prompt.token_ids) == [*tokenizer.encode("<s>"), *tokenizer.encode(end)]
