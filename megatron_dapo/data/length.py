"""The length of prompts; of a text that is far too long only a piece is tokenised."""

from __future__ import annotations

from collections.abc import Callable

from megatron_dapo.data.rows import RowError
from megatron_dapo.data.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]

ROOMY = 16
"""Characters per token of the piece that is tokenised first: about four times what languages and code have."""

LONGEST = 1 << 18
"""Characters that are tokenised in search of a text's last tokens; regular expressions give up on runs much longer."""


def fit(tokenizer: Tokenizer, text: str, raw: bool, limit: int, overflow: str) -> tuple[list[int] | None, bool]:
    """Ids of ``text``, at most ``limit``, and whether it is longer. A longer text is refused, or None (``drop``), or its end
    (``truncate``: left truncation); the begin-of-text id in front of a prompt stays there, as the model was trained.

    Raises:
        RowError: it is longer, and ``overflow`` is ``error``.
    """
    encode = tokenizer.encode_raw if raw else tokenizer.encode
    ids = None if sure_to_exceed(encode, text, limit) else encode(text)
    if ids is not None and len(ids) <= limit:
        return ids, False
    if overflow == "drop":
        return None, True
    if overflow == "error":
        size = f"{len(text)} characters, far more than" if ids is None else f"{len(ids)} tokens,"
        most = f"--rollout-max-prompt-len {limit} holds" if ids is None else f"--rollout-max-prompt-len is {limit}"
        raise RowError(f"its prompt has {size} {most}; raise it, or set --prompt-overflow drop or truncate")
    opened = raw or tokenizer.opens(tokenizer.encode(text[:256]))
    head = list(tokenizer.opening) if opened and len(tokenizer.opening) < limit else []
    rest = limit - len(head)
    return [*head, *(last_tokens(tokenizer.encode, text, rest) if ids is None else ids[-rest:])], True


def sure_to_exceed(encode: Encode, text: str, limit: int) -> bool:
    """True where a piece of ``text`` alone has far more than ``limit`` tokens, so that the rest need not be looked at.
    False says nothing; texts of usual length are not looked into."""
    size = ROOMY * limit + 1024
    while 4 * size < len(text):
        if len(encode(text[:size])) > 2 * limit:
            return True
        size *= 4
    return False


def last_tokens(encode: Encode, text: str, limit: int) -> list[int]:
    """The last ``limit`` (at least 1) ids of ``encode(text)``.

    Of a very long text only its end is tokenised. Where a token begins depends on what stands before it, so ends that were
    cut off in three places have to agree on every id; as long as they do not, longer ones are taken.

    Raises:
        RowError: they never agree, as in millions of spaces.
    """
    size = ROOMY * limit + 1024
    while 4 * size < len(text):
        first, *others = (encode(text[-n:]) for n in (size, size + 1, 2 * size + 3))
        if len(first) > 2 * limit and all(other[-limit:] == first[-limit:] for other in others):
            return first[-limit:]
        size *= 4
        if size > max(LONGEST, 64 * limit):
            raise RowError(
                f"its prompt has {len(text)} characters, whose end has no tokens of its own; shorten the row"
            )
    return encode(text)[-limit:]
