"""A stand-in for an SGLang server that fails on demand: what the real one cannot be told to do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

Behaviour = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]


def tokens_of(body: dict[str, Any]) -> list[int]:
    """What the stand-in generates: it depends on seed and position alone, so a resumed response is the uninterrupted one."""
    seed, start = body["sampling_params"]["sampling_seed"], len(body["input_ids"])
    return [(seed * 7 + start + i) % 50 + 1 for i in range(body["sampling_params"]["max_new_tokens"])]


def answer(token_ids: list[int], finish: str = "length", version: Any = "0", **meta: Any) -> dict[str, Any]:
    """A body as SGLang writes it."""
    return {
        "output_ids": token_ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "weight_version": version,
            "prompt_tokens": 3,
            "completion_tokens": len(token_ids),
            "cached_tokens": 1,
            "output_token_logprobs": [[-token / 100, token, None] for token in token_ids],
            **meta,
        },
    }


async def good(body: dict[str, Any], count: int) -> web.StreamResponse:
    """All tokens asked for, at once."""
    return web.json_response(answer(tokens_of(body)))


def events_of(whole: dict[str, Any], cuts: Iterable[int], incremental: bool) -> list[dict[str, Any]]:
    """An answer in parts that end at ``cuts``, as SGLang streams it: what is new in each, or everything so far."""
    meta, ids = whole["meta_info"], whole["output_ids"]
    entries, begin, events = meta["output_token_logprobs"], 0, []
    for end in [*cuts, len(ids)]:
        last = end == len(ids) and meta["finish_reason"]
        part = {
            "finish_reason": last or None,
            "completion_tokens": end,
            "output_token_logprobs": entries[begin:end],
        }
        events.append({"output_ids": ids[begin:end], "meta_info": {**meta, **part}})
        begin = end if incremental else 0
    return events


def stream(events: AsyncIterator[dict[str, Any]]) -> web.Response:
    """Events as they are sent."""

    async def lines() -> AsyncIterator[bytes]:
        async for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return web.Response(body=lines(), content_type="text/event-stream")


async def in_events(body: dict[str, Any], count: int) -> web.StreamResponse:
    """All tokens asked for, at once, in events of the size that was asked for."""
    whole = answer(tokens_of(body))

    async def events() -> AsyncIterator[dict[str, Any]]:
        every = range(1, len(whole["output_ids"]), body["sampling_params"].get("stream_interval", 1))
        for event in events_of(whole, every, incremental=True):
            yield event

    return stream(events())


def slowly(whole: dict[str, Any], seconds: float) -> web.Response:
    """A token an event, ``seconds`` apart."""

    async def events() -> AsyncIterator[dict[str, Any]]:
        for event in events_of(whole, range(1, len(whole["output_ids"])), incremental=True):
            await asyncio.sleep(seconds)
            yield event

    return stream(events())


class FakeServer:
    """Serves ``behaviour`` at /generate (called with the body and the number of requests so far) in a thread.

    Example:
        with FakeServer(good) as server:
            requests.post(server.url + "/generate", json=...)
    """

    def __init__(self, behaviour: Behaviour = good, health: int = 200) -> None:
        self.behaviour, self.health = behaviour, health
        self.waiting: int | None = None  # what it says of its queue, if anything
        self.version = "default"  # of the weights it was last given
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.url = ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        return await self.behaviour(body, len(self.bodies))

    async def _other(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/update_weights_from_disk":
            self.version = (await request.json())["weight_version"]
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/v1/loads" and self.waiting is not None:
            return web.json_response({"loads": [{"dp_rank": 0, "num_waiting_reqs": self.waiting}]})
        return web.json_response({"success": True})

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self.loop = asyncio.new_event_loop()

        async def serve() -> None:
            app = web.Application()
            app.router.add_post("/generate", self._generate)
            app.router.add_route("*", "/{path:.*}", self._other)
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
            ready.set()

        self.loop.create_task(serve())
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        assert ready.wait(120)
        return self

    def stop(self) -> None:
        """Close the port and every connection, as a process that is killed does."""

        async def end() -> None:
            await self.runner.cleanup()
            unanswered = asyncio.all_tasks() - {asyncio.current_task()}
            for task in unanswered:
                task.cancel()
            await asyncio.gather(*unanswered, return_exceptions=True)

        if self.loop.is_running():
            asyncio.run_coroutine_threadsafe(end(), self.loop).result(120)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(120)

    def __exit__(self, *_: object) -> None:
        self.stop()
