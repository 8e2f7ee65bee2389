"""The text that the policy is given for a row: through the chat template where there is one, else as it stands."""

from __future__ import annotations

from typing import Any

from megatron_dapo.config import DataOptions
from megatron_dapo.data.chat import ChatTemplate, parse_keywords
from megatron_dapo.data.rows import Row, RowError
from megatron_dapo.data.tokenizer import Tokenizer

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
"""The wording of the DAPO data sets."""

FOR_TEMPLATES = ("system", "tools", "chat_template_kwargs")
"""Columns beside the prompt that go into the chat template."""
NOT_TEXT = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of prompts that a policy of text alone cannot be given."""


def wording(options: DataOptions) -> str:
    """The text around a plain question, with ``{problem}`` where the question goes."""
    template = "dapo" if options.prompt_template == "auto" else options.prompt_template
    return {"dapo": DAPO_TEMPLATE, "none": "{problem}"}.get(template, template)


class PromptText:
    """Renders the rows of one run.

    A list of messages is rendered as it is; a plain question goes into the wording, and is one user turn. Both go through the
    chat template where the tokenizer has one; without one a question is raw text, and messages are refused.

    Raises:
        InputError: the options want a template that is not there, or not valid.
    """

    def __init__(self, options: DataOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer
        keywords = parse_keywords(options.chat_template_kwargs)
        wanted = options.apply_chat_template
        if wanted is None:
            wanted = bool(keywords) or tokenizer.chat_template() is not None
        self.template = ChatTemplate(tokenizer, keywords, options.unrendered_keys == "ignore") if wanted else None

    def __call__(self, row: Row, question: Any) -> str:
        """The text for ``row``, whose prompt is ``question``.

        Raises:
            RowError: a part of it would be lost, or it is no prompt.
        """
        columns = {column: row.get(column) for column in FOR_TEMPLATES}
        if row.path.endswith(".parquet"):
            question, columns = without_nulls(question), without_nulls(columns)
        beside = {column: value for column, value in columns.items() if value not in (None, "", [], {})}
        if found := next((c for c in NOT_TEXT if row.get(c) not in (None, "", [])), None):
            raise RowError(f"its {found!r} cannot be given to a policy of text alone; remove the column")
        if isinstance(question, str):
            if not question.strip():
                raise RowError("its prompt is empty")
            if question.lstrip().startswith(("[{", "[ {")) and '"role"' in question:
                raise RowError("its prompt is chat messages written as text; store them as a list")
            question = wording(self._options).replace("{problem}", question)
        if self.template is None:
            if beside:
                raise RowError(f"its {next(iter(beside))!r} is for a chat template, {self._without}; remove the column")
            return question if isinstance(question, str) else self._content_alone(question)
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        messages = _with_system(beside.get("system"), messages)
        return self.template.render(messages, beside.get("tools"), beside.get("chat_template_kwargs"))

    def _content_alone(self, messages: Any) -> str:
        """The content of one user message, which is all that can be had without a template."""
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise RowError("the prompt is neither text nor a list of chat messages; see --input-key")
        if self._options.apply_chat_template is None:
            raise RowError(
                f"chat messages are for a chat template, {self._without}; give one with --chat-template, or set "
                "--no-apply-chat-template where every row is one user message whose text stands for itself"
            )
        fields = messages[0] if len(messages) == 1 else {}
        filled = {k: v for k, v in fields.items() if v not in (None, "", [], {})}
        content = filled.get("content")
        if filled.keys() != {"role", "content"} or filled["role"] != "user" or not isinstance(content, str):
            raise RowError(
                "without a chat template a row of messages can be written only where it is one user message with a text, and "
                "nothing else; remove --no-apply-chat-template"
            )
        return content

    @property
    def _without(self) -> str:
        if self._options.apply_chat_template is False:
            return "and --no-apply-chat-template is set"
        return f"and the tokenizer in {self._tokenizer.path} has none"


def without_nulls(value: Any) -> Any:
    """``value`` of a parquet file without the keys that are null: all objects of a column have the same keys there, so an
    argument or a parameter that only one tool has stands as null in every other."""
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _with_system(system: Any, messages: Any) -> Any:
    """``messages`` behind a column ``system``."""
    if system is None:
        return messages
    if not isinstance(system, str):
        raise RowError("its 'system' is no text")
    if isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "system" for m in messages):
        raise RowError("it has a column 'system' and a system message; keep one")
    return [{"role": "system", "content": system}, *messages] if isinstance(messages, list) else messages
