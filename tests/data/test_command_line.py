"""The flags of the data path where a user types them: read, or refused in one line with exit code 2 before a model is built."""

from __future__ import annotations

import pytest
from tiny import write_task

from megatron_dapo.__main__ import main
from megatron_dapo.data.problems import load_problems
from megatron_dapo.training.arguments import parse

CHAT = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '0' if thinking else '' }}"


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(a) for a in argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron_dapo: error: "), lines
    return lines[0]


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs '{': not a JSON object"),
        (["--chat-template-kwargs", '{"a": 1}', "--no-apply-chat-template"], "nothing reads them"),
        (["--chat-template", "{{ 1 }}", "--no-apply-chat-template"], "--chat-template: nothing reads it"),
        (["--label-regex", "("], "--label-regex '(': not a regular expression"),
        (["--prompt-template", " "], "--prompt-template ' ': no {problem} in it"),
    ],
)
def test_flags_that_no_file_could_make_right(tmp_path, capsys, command, flags, words):
    assert words in refused(capsys, command, write_task(tmp_path), *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "problems.jsonl row 1: chat messages are for a chat template"),
        (["--chat-template", "absent.jinja"], "--chat-template absent.jinja: No such file"),
        (
            ["--chat-template", TEMPLATE, "--chat-template-kwargs", '{"think": 1}'],
            "does not read 'think' (it reads thinking)",
        ),
        (
            ["--chat-template", "{{ raise_exception('no users here') }}"],
            "row 1: the chat template refuses it: no users here",
        ),
    ],
)
def test_chat_rows_that_cannot_be_rendered(tmp_path, capsys, flags, words):
    assert words in refused(capsys, "train", write_task(tmp_path, CHAT), *flags)


def test_template_and_keywords_reach_training_and_evaluation(tmp_path):
    recipe = write_task(tmp_path, CHAT, eval_prompt_data=[str(tmp_path / "problems.jsonl")], chat_template=TEMPLATE)
    problems = load_problems(*parse([str(recipe), "--chat-template-kwargs", '{"thinking": true}']))
    assert problems is not None
    assert [p.text for p in (*problems.train, *problems.eval)] == ["1+1=0", "1+1=0"]


def test_the_plan_says_what_becomes_of_prompts(tmp_path, capsys):
    for flags, words in (
        ([], "prompts: through the tokenizer's chat template, where it has one; plain questions as they stand"),
        (
            ["--apply-chat-template", "--prompt-template", "dapo"],
            "prompts: through the chat template; plain questions in the dapo",
        ),
        (["--no-apply-chat-template"], "prompts: raw"),
    ):
        assert main(["plan", str(write_task(tmp_path)), *flags]) == 0
        assert words in capsys.readouterr().out


def test_the_recipe_of_a_run_keeps_the_choice(tmp_path):
    for flags, value in (([], None), (["--apply-chat-template"], True), (["--no-apply-chat-template"], False)):
        assert parse([str(write_task(tmp_path)), *flags])[0].resolved["apply_chat_template"] is value
    for value in (True, False):
        assert parse([str(write_task(tmp_path, apply_chat_template=value))])[1].data.apply_chat_template is value
