"""Chat messages through the tokenizer's own template, and nothing of a row dropped on the way.

A template silently leaves out what it does not know: a message of a role it has no branch for, a ``name``, a keyword. So what
a row carries is tried: rendered with and without. Where that makes no difference, the row is refused.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import meta, nodes

from megatron_dapo.data.rows import RowError, first_line, kind_of
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.types import InputError

Message = dict[str, Any]


class ChatTemplate:
    """The chat template of a tokenizer with the keywords of a run (``--chat-template-kwargs``).

    Raises:
        InputError: there is no template, or it is not valid, or it does not read one of the keywords.
    """

    def __init__(self, tokenizer: Tokenizer, keywords: dict[str, Any], ignore_unrendered: bool = False) -> None:
        source = tokenizer.chat_template()
        if source is None:
            way = "leave --chat-template-kwargs out" if keywords else "set --no-apply-chat-template"
            raise InputError(
                f"the tokenizer in {tokenizer.path} has no chat template; give one with --chat-template, or {way}"
            )
        self._tokenizer, self._keywords = tokenizer, keywords
        sources = {source, tokenizer.chat_template(tools=True) or source}
        self._reads = {name for source in sources for name in _variables(source, tokenizer.path)}
        self._ignore_unrendered = ignore_unrendered
        self._unrendered: dict[Any, list[str]] = {}
        self.left_out: Counter[str] = Counter()
        """Keys of messages that were not rendered, with the number of rows; only where that is ignored."""
        if unread := self._unread(keywords):
            raise InputError(f"--chat-template-kwargs: {unread}")

    def render(self, messages: Any, tools: Any = None, keywords: Any = None) -> str:
        """The text that the policy continues. ``tools`` and ``keywords`` are the row's own, and may be JSON as text.

        Raises:
            RowError: these are no messages, the template refuses them, or it does not render all that is in them.
        """
        checked = check_messages(messages)
        tools = _from_json(tools, "tools", list)
        own = _from_json(keywords, "chat_template_kwargs", dict) or {}
        if unread := self._unread(own):
            raise RowError(f"chat_template_kwargs: {unread}")
        chat = _Chat(self._tokenizer, checked, tools, {**self._keywords, **own})
        try:
            text = chat.render(checked, tools)
        except Exception as error:  # a template raises what it likes: that is its way to refuse
            raise RowError(f"the chat template refuses it: {first_line(error)}") from None
        shape = (bool(tools), *((m["role"], *sorted(_filled(m)), type(m["content"])) for m in checked))
        for number in range(1, len(checked) + 1):
            chat.check_content(number, text, tried=shape in self._unrendered)
        if shape not in self._unrendered:  # what a template reads depends on roles and keys: rows alike are tried once
            self._unrendered[shape] = chat.unrendered(text)
        self._account(self._unrendered[shape])
        return text

    def _account(self, unrendered: list[str]) -> None:
        if unrendered and ("tools" in unrendered or not self._ignore_unrendered):
            what = "the column 'tools'" if "tools" in unrendered else f"the key {unrendered[0]!r} of a message"
            way = "remove it" if "tools" in unrendered else "remove it, or set --unrendered-keys ignore"
            raise RowError(f"the chat template does not render {what}; {way}")
        self.left_out.update(set(unrendered))

    def _unread(self, keywords: dict[str, Any]) -> str | None:
        """What is wrong with the first of ``keywords`` that the template does not read."""
        for name in keywords:
            if name not in self._reads:
                reads = f"it reads {', '.join(sorted(self._reads))}" if self._reads else "it reads no keywords"
                return f"the chat template does not read {name!r} ({reads}); leave it out"
        return None


@dataclass(frozen=True)
class _Chat:
    """One row's messages, and whether the template reads a part of them."""

    tokenizer: Tokenizer
    messages: list[Message]
    tools: list[Any] | None
    keywords: dict[str, Any]

    def render(self, messages: list[Message], tools: list[Any] | None) -> str:
        return self.tokenizer.chat(messages, tools or None, **self.keywords)

    def differs(self, text: str, number: int, message: Message) -> bool:
        """True where the rendering is not ``text`` any more with ``message`` in the place of message ``number``."""
        try:
            return self.render([*self.messages[: number - 1], message, *self.messages[number:]], self.tools) != text
        except Exception:  # the template misses something: so it reads it
            return True

    def check_content(self, number: int, text: str, tried: bool) -> None:
        """Refuse message ``number`` where ``text`` has its content not, or as Python prints a list or None."""
        message = self.messages[number - 1]
        content = message["content"]
        if isinstance(content, str) and (not content.strip() or (tried and content.strip() in text)):
            return
        others: list[Any] = [f"x{content}x"]
        if isinstance(content, str) and content.strip() not in text:
            others.append("")
        if isinstance(content, list):
            others = [[*content[:i], {**p, "text": f"x{p['text']}x"}, *content[i + 1 :]] for i, p in enumerate(content)]
            if any(repr(part) in text for part in content):
                raise RowError(
                    f"the chat template takes no list of parts: write the content of message {number} as text"
                )
        if content is None:
            if "None" in text and self.differs(text, number, {**message, "content": ""}):
                raise RowError(f"the chat template writes the null content of message {number} as 'None'; write a text")
            return
        if not all(self.differs(text, number, {**message, "content": other}) for other in others):
            raise RowError(f"the chat template does not render message {number} (role {message['role']!r})")

    def unrendered(self, text: str) -> list[str]:
        """Keys of messages, and ``tools``, without which the rendering is the same."""
        found = []
        for number, message in enumerate(self.messages, 1):
            for key in sorted(_filled(message) - {"role", "content"}):
                if not self.differs(text, number, {k: v for k, v in message.items() if k != key}):
                    found.append(key)
        if self.tools and self.render(self.messages, None) == text:
            found.append("tools")
        return found


def check_messages(messages: Any) -> list[Message]:
    """``messages`` as a template can be given them: keys that are null are absent, which is how a parquet file writes a key
    that another row has; the content of a message that calls a tool may be null.

    Raises:
        RowError: they are none.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("the prompt is neither text nor a list of chat messages; see --input-key")
    checked = [_check_message(message, f"message {number}") for number, message in enumerate(messages, 1)]
    if checked[-1]["role"] == "assistant":
        raise RowError("its last message is the assistant's, and nothing is asked after it; remove that message")
    return checked


def _check_message(message: Any, what: str) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"{what} is {kind_of(message)}, not an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    role, content = kept.get("role"), kept.get("content")
    if not isinstance(role, str) or not role.strip():
        raise RowError(f"{what} has no role" if role is None else f"the role of {what} is {role!r}, not a text")
    if content is None and _filled(kept) - {"role", "name"}:
        return {**kept, "content": None}
    if isinstance(content, list) and content:
        for number, part in enumerate(content, 1):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                shown = part.get("type") if isinstance(part, dict) else part
                raise RowError(
                    f"part {number} of {what} is {shown!r:.40}; only {{'type': 'text', 'text': ...}} can be used"
                )
        kept["content"] = [{k: v for k, v in part.items() if v is not None} for part in content]
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowError(f"the content of {what} is {kind_of(content)}, not text")
    if role == "user" and not content.strip():
        raise RowError(f"the content of {what} is empty")
    return kept


def parse_keywords(given: str | None) -> dict[str, Any]:
    """The object of ``--chat-template-kwargs``.

    Raises:
        InputError: it is none.
    """
    if given is None:
        return {}
    try:
        keywords = json.loads(given)
    except (ValueError, RecursionError):
        keywords = None
    if not isinstance(keywords, dict):
        raise InputError(
            f"--chat-template-kwargs {given!r}: not a JSON object; write it as '{{\"enable_thinking\": false}}'"
        )
    return keywords


def _from_json(value: Any, column: str, kind: type) -> Any:
    """A column that holds a list or an object, or the same as JSON text; None where it is empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"its {column!r} is text that is no JSON") from None
    if value and not isinstance(value, kind):
        raise RowError(f"its {column!r} is {kind_of(value)}, not {'a list' if kind is list else 'an object'}")
    if isinstance(value, list) and not all(isinstance(v, dict) for v in value):
        raise RowError(f"its {column!r} holds something else than objects")
    return value or None


def _variables(source: str, path: str) -> set[str]:
    """The keywords that a template reads, whichever of its branches is taken."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters  # tools, max_length ...
    try:
        environment = chat_template_utils._compile_jinja_template(source).environment
        tree = environment.parse(source)
        names = meta.find_undeclared_variables(tree)
    except Exception as error:  # jinja's syntax errors, and what its parser stumbles over
        raise InputError(f"the chat template of the tokenizer in {path} is not valid: {first_line(error)}") from None
    return names - _own_variables(tree) - set(environment.globals) - set(taken) - {"messages"}


def _own_variables(tree: nodes.Template) -> set[str]:
    """Names that a template sets for itself, whatever it is given: not those it sets only where they are not given, as in
    ``{% if not x is defined %}{% set x = 1 %}`` and ``{% set x = x | default(1) %}``."""

    def loaded(node: nodes.Node) -> set[str]:
        found = [node] if isinstance(node, nodes.Name) else []
        return {name.name for name in [*found, *node.find_all(nodes.Name)] if name.ctx == "load"}

    def stored(parts: Iterable[nodes.Node]) -> set[str]:
        names = (name for part in parts for name in [part, *part.find_all(nodes.Name)] if isinstance(name, nodes.Name))
        return {name.name for name in names if name.ctx == "store"}

    given = {name for assign in tree.find_all(nodes.Assign) for name in loaded(assign.node) & stored([assign.target])}
    for choice in tree.find_all(nodes.If):
        given |= loaded(choice.test) & stored(choice.body)
    for test in tree.find_all(nodes.Test):
        given |= loaded(test.node) if test.name in ("defined", "undefined") else set()
    return stored([tree]) - given


def _filled(message: Message) -> set[str]:
    """Keys that say something."""
    return {key for key, value in message.items() if value is not None and value not in ("", [], {})}
