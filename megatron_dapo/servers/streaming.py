"""An answer of ``/generate`` as it arrives: streamed, so that a request that makes progress is known from one that does not."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from megatron_dapo.servers.control import ServerError
from megatron_dapo.servers.replies import count_of


async def read_answer(url: str, reply: aiohttp.ClientResponse, on_progress: Callable[[], None]) -> Any:
    """The whole answer, unchecked, as it is without streaming. ``on_progress`` is called when tokens arrive; by a server
    that does not stream, once, at the end.

    Raises:
        ServerError: the status is not 200.
        ValueError, KeyError, TypeError: it is no answer, or broke off.
    """
    if reply.status != 200:
        said = (await reply.read())[:300].decode(errors="replace")
        raise ServerError(url, f"/generate answered {reply.status}: {said}")
    if reply.content_type != "text/event-stream":
        raw = await reply.read()
        on_progress()
        return _json(raw)
    assembly = Assembly()
    async for event in _events(reply.content):
        if assembly.add(event):
            on_progress()
    return assembly.answer()


class Assembly:
    """A streamed answer out of its events, for servers whose events hold what is new (``--incremental-streaming-output``)
    as well as for those whose events hold everything so far.

    Example:
        assembly = Assembly()
        for event in events:      # the JSON after "data: "
            assembly.add(event)
        reply = parse_reply(assembly.answer(), most)
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._ids: list[Any] = []
        self._entries: list[Any] = []
        self._meta: dict[str, Any] | None = None
        self._whole: bytes | None = None

    def add(self, raw: bytes) -> bool:
        """One event; True where it brought tokens.

        Raises:
            ValueError, KeyError, TypeError: it is not one.
        """
        before = self.tokens
        if self._whole is not None:  # everything so far in each event: only the last one is worth reading
            counted = re.search(rb'"completion_tokens":\s*(\d+)', raw)
            self._whole, self.tokens = raw, int(counted[1]) if counted else before
            return self.tokens > before
        event = _json(raw)
        if "error" in event:
            raise ValueError(f"the server says: {event['error']}")
        meta, ids = event["meta_info"], event["output_ids"]
        entries = meta.get("output_token_logprobs") or []
        self._meta, self.tokens = meta, count_of(meta["completion_tokens"])
        if len(entries) < self.tokens:
            self._ids, self._entries = self._ids + ids, self._entries + entries
            return self.tokens > before
        if 0 < before < self.tokens == len(entries):
            self._whole = raw
        # For a request that was cut short, incremental servers too give all log-probs, but only the last id.
        self._entries = entries[len(entries) - self.tokens :]
        self._ids = ids if len(ids) == len(entries) else [entry[1] for entry in self._entries]
        return self.tokens > before

    def answer(self) -> Any:
        """The answer as it is without streaming.

        Raises:
            ValueError, KeyError, TypeError: the stream broke off, or its events do not make one.
        """
        if self._whole is not None:
            answer = json.loads(self._whole)
        elif self._meta is None:
            raise ValueError("a stream without an event")
        else:
            answer = {"output_ids": self._ids, "meta_info": {**self._meta, "output_token_logprobs": self._entries}}
        if not answer["meta_info"]["finish_reason"]:
            raise ValueError("the stream broke off")
        if len(answer["output_ids"]) != self.tokens:
            raise ValueError(f"{len(answer['output_ids'])} tokens arrived of {self.tokens}")
        return answer


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        raise ValueError(f"no JSON: {raw[:200]!r}") from None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, without the closing "[DONE]"."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data
