"""The nouns: their documentation names what they have."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from megatron_dapo import types

NOUNS = {name: cls for name, cls in vars(types).items() if dataclasses.is_dataclass(cls) and isinstance(cls, type)}
ELSEWHERE = {"overlong_filtering"}
"""Options that the documentation of a noun speaks of."""


@pytest.mark.parametrize("name", NOUNS)
def test_what_a_noun_documents_is_there(name):
    """``x`` is an attribute of it, ``Y.x`` one of another noun, ``part.module`` a module; and every field is documented."""
    fields = {field.name for field in dataclasses.fields(NOUNS[name])}
    has = fields | set(vars(NOUNS[name]))
    text = inspect.getdoc(NOUNS[name]) or ""
    for word in re.findall(r"``([A-Za-z_.]+)``", text):
        noun, _, attribute = word.partition(".")
        if noun in NOUNS:
            theirs = {field.name for field in dataclasses.fields(NOUNS[noun])}
            assert not attribute or attribute in theirs, word
        elif "." not in word and word not in ELSEWHERE:
            assert word in has or word in types.FinishReason.__args__, f"{name} documents {word}, which it has not"
    if name in ("Sample", "Trajectories"):
        undocumented = {field for field in fields if f"``{field}``" not in text}
        assert undocumented <= {"finish_reason", "text"}, undocumented
