"""The client of SGLang servers: token ids in, token ids and log-probs out, no sample lost and none twice.

All samples of a prompt go to one server, where they share its cached prefix; a group goes to the server with the fewest
tokens outstanding. A request that fails, or whose server is marked failed, is sent elsewhere; what a server cut short goes on
from the tokens it has. Requests wait here, not at the servers: at most ``rollout_concurrency`` are under way at each.

Answers are streamed, as a sign of life: a request may take as long as it likes while tokens arrive, and is taken for lost
after ``rollout_request_timeout_s`` without one, unless it may be waiting in its server's queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import numpy as np

from megatron_dapo.config import ServerOptions
from megatron_dapo.servers.control import ServerError
from megatron_dapo.servers.fleet import Fleet, Server
from megatron_dapo.servers.replies import ID_LIMIT, Reply, parse_reply, request_body
from megatron_dapo.servers.streaming import read_answer
from megatron_dapo.types import InputError, Request, Sample, SamplingParams, Sums

STRIKES = 3
"""Failures in a row after which a server is marked failed."""

BACKOFF_S = 0.05
"""Wait before the first retry; it doubles up to 100 times this."""

LOOK_S = 5.0
"""Longest time between two looks for requests without progress."""


@dataclass
class Job:
    """One response on its way; ``parts`` are what servers have answered so far, in order. Its request is at ``url`` and
    was last ``heard`` of then; ``idle``: there, an empty queue was seen since."""

    index: int
    request: Request
    parts: list[Reply] = field(default_factory=list)
    tries: int = 0
    why: str = ""
    last: Server | None = None
    routed: bool = False
    url: str = ""
    heard: float = 0.0
    idle: bool = False
    done: bool = False

    @property
    def tokens(self) -> list[int]:
        """All token ids so far."""
        return [token for part in self.parts for token in part.token_ids]

    def cost(self, params: SamplingParams) -> int:
        """Most tokens the next request can keep a server busy with."""
        return len(self.request.prompt.token_ids) + params.max_tokens

    def sample(self, version: int, decode: Callable[[list[int]], str]) -> Sample:
        """The response as the rest of the system knows it."""
        tokens, spans = self.tokens, _joined(self.parts)
        return Sample(
            token_ids=np.array(tokens, dtype=np.int64),
            logprobs=np.array([x for part in self.parts for x in part.logprobs], dtype=np.float32),
            finish_reason=self.parts[-1].finish_reason if self.parts else "abort",
            weight_version=min((v for v, _, _ in spans), default=version),
            text=decode(tokens),
            spans=spans if len(spans) > 1 else (),
        )


def _joined(parts: list[Reply]) -> tuple[tuple[int, int, int], ...]:
    """(version, begin, end) over all parts, neighbours of one version as one."""
    spans: list[tuple[int, int, int]] = []
    start = 0
    for part in parts:
        for version, begin, end in part.spans:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], start + end)
            else:
                spans.append((version, start + begin, start + end))
        start += len(part.token_ids)
    return tuple(spans)


class SglangClient:
    """Sends requests to the servers of a fleet. ``version`` tells the weights that servers should have; ids are below
    ``vocab_size``."""

    def __init__(
        self,
        fleet: Fleet,
        options: ServerOptions,
        decode: Callable[[list[int]], str],
        version: Callable[[], int],
        vocab_size: int = ID_LIMIT,
    ) -> None:
        self.fleet, self.options, self.decode, self.version = fleet, options, decode, version
        self.vocab_size = vocab_size
        self.router_down = False
        self.counts: Sums = {}

    def generate(
        self,
        requests: list[Request],
        params: SamplingParams,
        find_server: Callable[[], None],
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        """One sample per request, in order. ``find_server`` returns when a server serves again, or raises.

        Raises:
            InputError: every single request failed; the message has a server's reason.
        """
        jobs = [Job(index, request) for index, request in enumerate(requests)]
        while todo := [job for job in jobs if not job.done]:
            if not self.fleet.serving():
                find_server()
            asyncio.run(_Round(self, todo, params, on_finish, len(jobs) - len(todo)).run())
        lost = [job for job in jobs if not job.parts or job.parts[-1].finish_reason == "abort"]
        if jobs and len(lost) == len(jobs):
            raise InputError(f"all {len(jobs)} requests to the SGLang servers failed, the last with: {lost[-1].why}")
        self.count("rollout/lost", len(lost), len(jobs))
        return [job.sample(self.version(), self.decode) for job in jobs]

    def count(self, name: str, n: float, of: float = 0.0) -> None:
        """Add to what ``report`` tells."""
        total, count = self.counts.get(name, (0.0, 0.0))
        self.counts[name] = (total + n, count + of)


class _Round:
    """Drives jobs until all are done or nobody serves."""

    def __init__(
        self,
        client: SglangClient,
        jobs: list[Job],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None,
        finished: int,
    ) -> None:
        self.client, self.fleet, self.options, self.params = client, client.fleet, client.options, params
        self.on_finish, self.finished = on_finish, finished
        self.groups = deque(_by_prompt(jobs))
        self.own: dict[str, deque[Job]] = {server.url: deque() for server in self.fleet.servers}
        self.running: dict[asyncio.Task[Reply], tuple[Job, Server]] = {}
        self.ended: list[asyncio.Task[Reply]] = []
        self.strikes: dict[str, int] = {}
        self.progress: dict[str, float] = {}
        self.wedged: set[asyncio.Task[Reply]] = set()

    async def run(self) -> None:
        """Send, and send again."""
        self.wake, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_lost(server: Server) -> None:
            loop.call_soon_threadsafe(self._drop, server)

        self.fleet.on_lost.append(on_lost)
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        watch = loop.create_task(self._watch_progress())
        watch.add_done_callback(lambda _: self.wake.set())
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as self.session:
                self._dispatch()
                while self.running:
                    await self.wake.wait()
                    self.wake.clear()
                    if watch.done():
                        watch.result()  # raises what ended it
                    for task in self.ended[:]:
                        self._settle(task)
                    self._dispatch()
        finally:
            watch.cancel()
            self.fleet.on_lost.remove(on_lost)
            await self._cancel()

    async def _cancel(self) -> None:
        """After an exception: the servers should not go on with what nobody waits for. Closing a connection aborts its
        request at the server."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        for job, server in self.running.values():
            self.fleet.account(server, -1, -job.cost(self.params))

    # --- who gets what ---------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Start requests wherever there is room, one at a time at the server with the fewest tokens outstanding."""
        for url in [url for url, queue in self.own.items() if queue]:
            if not any(server.url == url for server in self.fleet.serving()):
                self.groups.extendleft([job] for job in self._drain(url))
        while True:
            room = [s for s in self.fleet.serving() if s.running < self.options.rollout_concurrency]
            able = [s for s in room if self.own.get(s.url) or self.groups]
            if not able:
                return
            server = min(able, key=lambda s: s.outstanding)
            queue = self.own.setdefault(server.url, deque())
            if not queue:
                queue.extend(self._next_group(server, len(room)))
            self._send(queue.popleft(), server)

    def _next_group(self, server: Server, choices: int) -> list[Job]:
        """The next group; one that just failed at this server only where there is no other choice."""
        for place, group in enumerate(self.groups):
            if group[0].last is not server or choices == 1:
                del self.groups[place]
                return group
        return self.groups.popleft()

    def _drain(self, url: str) -> list[Job]:
        queue, self.own[url] = self.own[url], deque()
        return list(queue)

    def _send(self, job: Job, server: Server) -> None:
        job.last, job.heard, job.idle = server, time.monotonic(), False
        self.fleet.account(server, 1, job.cost(self.params))
        task = asyncio.ensure_future(self._request(job, server))
        self.running[task] = (job, server)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Reply]) -> None:
        self.ended.append(task)
        self.wake.set()

    def _drop(self, server: Server) -> None:
        for task, (_, where) in self.running.items():
            if where is server:
                task.cancel()

    # --- one request -----------------------------------------------------------------------------------------------

    async def _request(self, job: Job, server: Server) -> Reply:
        if job.tries:
            await asyncio.sleep(BACKOFF_S * min(2 ** (job.tries - 1), 100))
        tokens, oldest = job.tokens, self.client.version()
        body = request_body(job.request, tokens, self.params)
        router = None if self.client.router_down else self.options.rollout_router_url
        url, job.routed = router or server.url, router is not None
        job.url, job.heard, most = url, time.monotonic(), self.params.max_tokens - len(tokens)
        try:
            async with self.session.post(url + "/generate", json=body) as reply:
                answer = await read_answer(url, reply, partial(self._hears, job))
            parsed = parse_reply(answer, most, self.params.stop_token_ids, self.client.vocab_size)
        except ServerError:
            raise
        except aiohttp.ClientError as error:
            if router and not self.client.router_down:
                self.client.router_down = True
                self.fleet.note(f"router {router} does not answer ({type(error).__name__}): requests go to the servers")
            raise ServerError(url, f"/generate: {type(error).__name__} {error}") from None
        except Exception as error:  # whatever a server says, it is the server's fault and does not end the run
            raise ServerError(url, f"/generate answered what is no response ({type(error).__name__} {error})") from None
        if not all(oldest <= version <= self.client.version() for version, _, _ in parsed.spans):
            self.fleet.mark_stale(server, f"answered with weights {parsed.spans}, {oldest} is current")
            raise ServerError(url, f"/generate answered with weights {parsed.spans}, {oldest} is current")
        self.client.count("rollout/cached_tokens", parsed.cached_tokens, parsed.prompt_tokens)
        return parsed

    # --- who makes progress ----------------------------------------------------------------------------------------

    def _hears(self, job: Job) -> None:
        """Tokens of ``job`` arrived."""
        job.heard = self.progress[job.url] = time.monotonic()
        job.idle = False

    async def _watch_progress(self) -> None:
        """Cut requests off that make no progress. While weights are published nobody does."""
        while True:
            await asyncio.sleep(min(self.options.rollout_request_timeout_s / 4, LOOK_S))
            now = time.monotonic()
            if self.fleet.paused:
                for job, _ in self.running.values():
                    job.heard = now
                continue
            await self._cut_silent(now, now - self.options.rollout_request_timeout_s)

    async def _cut_silent(self, now: float, since: float) -> None:
        """A request of which no token came ``since`` then is lost, unless it may be in the queue of a server at work."""
        silent = [(task, job) for task, (job, _) in self.running.items() if job.heard < since]
        at_work = {url for url, heard in self.progress.items() if heard >= since}
        queues = {url: await self._queue(url) for url in {job.url for _, job in silent} & at_work}
        for task, job in silent:
            if task.done() or job.heard >= since:  # meanwhile
                continue
            waiting = queues.get(job.url, 0)
            if job.url not in at_work or (waiting == 0 and job.idle):
                self.wedged.add(task)
                task.cancel()
            elif waiting is not None:  # it has as long again from when the queue is empty
                job.heard, job.idle = now, waiting == 0

    async def _queue(self, url: str) -> int | None:
        """Requests that wait at a server; None where it does not tell."""
        limit = aiohttp.ClientTimeout(total=LOOK_S)
        with suppress(Exception):
            async with self.session.get(url + "/v1/loads", params={"include": "core"}, timeout=limit) as reply:
                return sum(int(load["num_waiting_reqs"]) for load in (await reply.json())["loads"])
        return None

    # --- what becomes of it ----------------------------------------------------------------------------------------

    def _settle(self, task: asyncio.Task[Reply]) -> None:
        """Book what became of a request; what has to be sent again waits in front."""
        self.ended.remove(task)
        job, server = self.running.pop(task)
        self.fleet.account(server, -1, -job.cost(self.params))
        again = True
        if task.cancelled() and task in self.wedged:
            waited = f"{self.options.rollout_request_timeout_s:g} s, counted from its last token"
            again = self._failed(job, server, f"{job.url}/generate: no answer in {waited}")
        elif task.cancelled():
            job.why = f"{server.url} was marked failed: {server.why}"
            self.client.count("rollout/rerouted", 1)
        elif (error := task.exception()) is not None:
            if not isinstance(error, ServerError):
                raise error
            again = self._failed(job, server, str(error))
        else:
            self.strikes[server.url] = 0
            again = self._answered(job, task.result())
        if again:
            self.groups.appendleft([job])
            return
        job.done = True
        self.finished += 1
        if self.on_finish:
            self.on_finish(self.finished)

    def _answered(self, job: Job, reply: Reply) -> bool:
        """Keep the answer; True where it was cut short and has to go on."""
        if reply.finish_reason != "abort" or reply.token_ids:
            job.parts.append(reply)
        if reply.finish_reason != "abort":
            return False
        job.why, job.tries = f"cut short at the server: {reply.message}", 0 if reply.token_ids else job.tries + 1
        self.client.count("rollout/resumed", 1)
        return job.tries <= self.options.rollout_max_retries

    def _failed(self, job: Job, server: Server, why: str) -> bool:
        job.tries, job.why = job.tries + 1, why
        self.client.count("rollout/retries", 1)
        if job.routed:  # whoever failed, it need not be this server
            return job.tries <= self.options.rollout_max_retries
        self.strikes[server.url] = self.strikes.get(server.url, 0) + 1
        if self.strikes[server.url] >= STRIKES:
            self.strikes[server.url] = 0
            self.fleet.discard(server, f"{STRIKES} requests in a row failed, the last with: {why}")
        return job.tries <= self.options.rollout_max_retries


def _by_prompt(jobs: list[Job]) -> list[list[Job]]:
    """Jobs of one prompt that follow each other, together."""
    groups: list[list[Job]] = []
    for job in jobs:
        if groups and groups[-1][0].request.prompt is job.request.prompt:
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups
