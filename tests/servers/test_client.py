"""The client of SGLang servers against servers that misbehave: every sample accounted for, none lost, none twice."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from fake_sglang import FakeServer, answer, events_of, good, slowly, stream, tokens_of

from megatron_dapo.config import Options, ServerOptions
from megatron_dapo.rollout.trajectories import build_trajectories
from megatron_dapo.servers.client import Job, SglangClient, _Round
from megatron_dapo.servers.fleet import Fleet, Server
from megatron_dapo.types import Group, InputError, Prompt, Request, Sample, SamplingParams

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=(99,))


def requests_of(prompts: int = 4, samples: int = 4) -> list[Request]:
    made = [Prompt(f"p{i}", "", (1, 2, 3 + i), "", "") for i in range(prompts)]
    return [Request(prompt, 10 * i + j) for i, prompt in enumerate(made) for j in range(samples)]


@contextlib.contextmanager
def fleet_of(*servers: FakeServer, **options: Any) -> Iterator[tuple[Fleet, list[str]]]:
    """A fleet of running fakes that all hold the current weights, and what it noted."""
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        fleet = Fleet(ServerOptions(**options), [Server(s.url, 1, state="stale") for s in servers], notes.append)
        fleet.published(fleet.servers)
        yield fleet, notes


def never() -> None:
    raise AssertionError("no server was left")


def generate(fleet: Fleet, requests: list[Request], find=never, version: int = 0) -> tuple[list[Sample], SglangClient]:
    client = SglangClient(fleet, fleet.options, lambda ids: " ".join(map(str, ids)), lambda: version)
    return client.generate(requests, PARAMS, find), client


def check(samples: list[Sample], requests: list[Request]) -> None:
    """Exactly the responses of an undisturbed server, each at the place of its request."""
    for sample, request in zip(samples, requests, strict=True):
        body = {
            "input_ids": request.prompt.token_ids,
            "sampling_params": {"sampling_seed": request.seed, "max_new_tokens": 8},
        }
        assert sample.token_ids.tolist() == tokens_of(body)
        assert sample.logprobs.tolist() == pytest.approx([-t / 100 for t in tokens_of(body)])
        assert sample.finish_reason == "length" and sample.weight_version == 0


def test_every_parameter_is_sent_and_a_group_stays_together():
    a, b = FakeServer(), FakeServer()
    requests = requests_of(6, 4)
    with fleet_of(a, b) as (fleet, _):
        samples, client = generate(fleet, requests)
    check(samples, requests)
    sent = a.bodies[0]["sampling_params"]
    assert sent["temperature"] == 0.7 and sent["repetition_penalty"] == 1.0 and sent["stop_token_ids"] == [99]
    assert sent["top_p"] == 1.0 and sent["top_k"] == -1 and sent["min_p"] == 0.0 and sent["no_stop_trim"]
    prompts = [{tuple(body["input_ids"]) for body in server.bodies} for server in (a, b)]
    assert not prompts[0] & prompts[1] and len(prompts[0]) + len(prompts[1]) == 6
    assert client.counts["rollout/cached_tokens"] == (24.0, 72.0) and client.counts["rollout/lost"] == (0.0, 24.0)
    assert all(server.outstanding == 0 and server.running == 0 for server in fleet.servers)


def test_requests_wait_here_and_not_at_the_server():
    most = running = 0

    async def counting(body: dict[str, Any], count: int) -> web.StreamResponse:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await good(body, count)

    with fleet_of(FakeServer(counting), rollout_concurrency=5) as (fleet, _):
        check(generate(fleet, requests_of(5, 8))[0], requests_of(5, 8))
    assert most == 5


async def five_hundred(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.Response(status=500, text="CUDA error: an illegal memory access was encountered")


async def four_hundred(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=400)


async def garbage(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.Response(text="<html>proxy</html>")


async def shifted(body: dict[str, Any], count: int) -> web.StreamResponse:
    """Log-probs that belong to other tokens."""
    reply = answer(tokens_of(body))
    reply["meta_info"]["output_token_logprobs"].pop()
    return web.json_response(reply)


async def not_a_number(body: dict[str, Any], count: int) -> web.StreamResponse:
    reply = answer(tokens_of(body))
    reply["meta_info"]["output_token_logprobs"][0][0] = float("nan")
    return web.json_response(reply)


async def too_long(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.json_response(answer([*tokens_of(body), 5]))


async def outside(body: dict[str, Any], count: int) -> web.StreamResponse:
    """An id that no 64-bit integer holds."""
    return web.json_response(answer([*tokens_of(body)[:-1], 2**70]))


async def uncovered(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.json_response(
        answer(
            tokens_of(body),
            weight_versions=[{"version": "0", "start": 0, "end": 1}, {"version": "0", "start": 5, "end": 8}],
        )
    )


async def bottomless(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.Response(text="[" * 100_000, content_type="application/json")


async def stops_elsewhere(body: dict[str, Any], count: int) -> web.StreamResponse:
    return web.json_response(answer(tokens_of(body)[:3], finish_reason={"type": "stop", "matched": 7}))


async def breaks_off(body: dict[str, Any], count: int) -> web.StreamResponse:
    async def events() -> Any:
        yield events_of(answer(tokens_of(body)), [4], incremental=True)[0]

    return stream(events())


async def fails_in_the_stream(body: dict[str, Any], count: int) -> web.StreamResponse:
    async def events() -> Any:
        yield {"error": {"message": "too long", "code": 400}}

    return stream(events())


BAD = [
    five_hundred, four_hundred, garbage, shifted, not_a_number, too_long, outside, uncovered, bottomless, stops_elsewhere,
    breaks_off, fails_in_the_stream,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_server_that_answers_badly_is_given_up_and_nothing_is_lost(bad):
    requests = requests_of(6, 4)
    with fleet_of(FakeServer(bad), FakeServer()) as (fleet, notes):
        samples, client = generate(fleet, requests)
        assert [server.state for server in fleet.servers] == ["lost", "serving"]
    check(samples, requests)
    assert client.counts["rollout/retries"][0] >= 3 and client.counts["rollout/lost"] == (0.0, 24.0)
    assert len(notes) == 1 and "is marked failed: 3 requests in a row failed" in notes[0]


def test_ids_are_those_of_the_vocabulary():
    """The fake's ids reach 50."""
    with fleet_of(FakeServer(), rollout_max_retries=0) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, lambda: 0, vocab_size=51)
        check(client.generate(requests_of(2, 4), PARAMS, never), requests_of(2, 4))
        client = SglangClient(fleet, fleet.options, str, lambda: 0, vocab_size=3)
        with pytest.raises(InputError, match=r"outside the vocabulary 0 \.\. 2"):
            client.generate(requests_of(2, 1), PARAMS, never)


# --- finished or cut short -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "whole", "meaning"),
    [
        ([4, 5, 6, 99], [4, 5, 6, 99], "stop"),
        ([4, 5, 6, 7, 8, 9, 10, 99], [4, 5, 6, 7, 8, 9, 10, 99], "stop"),
        ([4, 5, 6, 7, 8, 9, 10, 11], [4, 5, 6, 7, 8, 9, 10, 11], "length"),
        ([4, 5, 6, 7, 8, 9, 10], [4, 5, 6, 7, 8, 9, 10, 21], "length"),
        ([4, 5, 6], [4, 5, 6, 21, 22, 99], "stop"),
        ([], [21, 22, 23, 24, 99], "stop"),
    ],
)
def test_an_aborted_answer_goes_on_only_where_it_is_not_finished(first, whole, meaning):
    """A server may decode once more after an abort, so an aborted answer can be a finished one."""
    rest = whole[len(first) :]

    async def aborts_once(body: dict[str, Any], count: int) -> web.StreamResponse:
        assert body["sampling_params"]["max_new_tokens"] == (8 if count == 1 else 8 - len(first)) > 0
        return web.json_response(
            answer(first, "abort") if count == 1 else answer(rest, "stop" if 99 in rest else "length")
        )

    server = FakeServer(aborts_once)
    with fleet_of(server) as (fleet, notes):
        (sample,), client = generate(fleet, requests_of(1, 1))
        assert fleet.servers[0].state == "serving" and not notes
    assert sample.token_ids.tolist() == whole and sample.finish_reason == meaning
    assert sample.truncated == (meaning == "length") and sample.spans == ()
    assert sample.logprobs.tolist() == pytest.approx([-token / 100 for token in whole])
    assert len(server.bodies) == 1 + bool(rest) and client.counts["rollout/lost"] == (0.0, 1.0)
    assert "rollout/retries" not in client.counts and ("rollout/resumed" in client.counts) == bool(rest)


def test_every_token_of_a_resumed_sample_is_trained_on_and_none_of_a_lost_one():
    """What an older version wrote counts as well (importance weights are for that), in the order of the tokens; of a sample
    that was marked failed, nothing does."""
    cut = {0: 3, 1: 1, 2: 7, 3: None}  # by the sample's seed: tokens before the abort; the last one is never answered

    async def behaves(body: dict[str, Any], count: int) -> web.StreamResponse:
        tokens, keeps = tokens_of(body), cut[body["sampling_params"]["sampling_seed"]]
        if keeps is None:
            return web.json_response({"error": "too long for me"}, status=400)
        first = len(body["input_ids"]) == 3
        return web.json_response(answer(tokens[:keeps], "abort", "3") if first else answer(tokens, version="4"))

    requests = requests_of(1, 4)
    with fleet_of(FakeServer(behaves), rollout_max_retries=0) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, Versions(3, 4))
        samples = client.generate(requests, PARAMS, never)
    for index, sample in enumerate(samples):
        sample.acc = sample.score = float(index % 2)
        sample.status = "ok"
    options = Options.from_args(rollout_max_response_len=8, overlong_buffer_len=0)
    rows, sums = build_trajectories([Group(requests[0].prompt, samples, 0)], options)
    whole = [
        tokens_of({"input_ids": [1, 2, 3], "sampling_params": {"sampling_seed": i, "max_new_tokens": 8}})
        for i in range(3)
    ]
    assert [t.tolist() for t in rows.tokens] == [*([1, 2, 3, *tokens] for tokens in whole), [1, 2, 3]]
    assert [mask.tolist() for mask in rows.loss_mask] == [[True] * 8] * 3 + [[]]
    assert [logprobs.tolist() for logprobs in rows.rollout_logprobs[:3]] == [
        pytest.approx([-token / 100 for token in tokens]) for tokens in whole
    ]
    assert rows.weight_version.tolist()[:3] == [3, 3, 3] and [s.spans[0] for s in samples[:3]] == [
        (3, 0, 3),
        (3, 0, 1),
        (3, 0, 7),
    ]
    assert sums["response_length/clip_ratio"] == (3.0, 4.0)
    filtered, _ = build_trajectories(
        [Group(requests[0].prompt, samples, 0)],
        Options.from_args(rollout_max_response_len=8, overlong_buffer_len=0, overlong_filtering=True),
    )
    assert not any(mask.any() for mask in filtered.loss_mask)  # all used their budget over both parts together


def test_the_tokens_of_a_sample_given_up_in_the_middle_leave_the_loss():
    async def never_ends(body: dict[str, Any], count: int) -> web.StreamResponse:
        if len(body["input_ids"]) > 3 or body["sampling_params"]["sampling_seed"] == 1:
            return web.json_response({"error": "no"}, status=400) if count > 2 else await good(body, count)
        return web.json_response(answer(tokens_of(body)[:5], "abort"))

    requests = requests_of(1, 2)
    with fleet_of(FakeServer(never_ends), rollout_max_retries=0, rollout_concurrency=1) as (fleet, _):
        samples, client = generate(fleet, requests)
    assert sorted((sample.finish_reason, sample.length) for sample in samples) == [("abort", 5), ("length", 8)]
    for sample in samples:
        sample.status, sample.acc = "ok", float(sample.finish_reason == "length")
    options = Options.from_args(rollout_max_response_len=8, overlong_buffer_len=0)
    rows, _ = build_trajectories([Group(requests[0].prompt, samples, 0)], options)
    assert {sample.finish_reason: mask.tolist() for sample, mask in zip(samples, rows.loss_mask, strict=True)} == {
        "abort": [False] * 5,
        "length": [True] * 8,
    }
    assert client.counts["rollout/lost"] == (1.0, 2.0)


# --- progress --------------------------------------------------------------------------------------------------------


async def hangs(body: dict[str, Any], count: int) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def says_nothing_new(body: dict[str, Any], count: int) -> web.StreamResponse:
    """Half of the tokens, then the same event for ever."""

    async def events() -> Any:
        first = events_of(answer(tokens_of(body)), [4], incremental=False)[0]
        while True:
            yield first
            await asyncio.sleep(0.05)

    return stream(events())


@pytest.mark.parametrize("stuck", [hangs, says_nothing_new])
def test_a_server_that_hangs_is_left_after_the_timeout(stuck):
    requests = requests_of(4, 4)
    with fleet_of(FakeServer(stuck), FakeServer(), rollout_request_timeout_s=0.5) as (fleet, notes):
        check(generate(fleet, requests)[0], requests)
        assert "no answer in 0.5 s" in notes[0] and fleet.servers[0].state == "lost"


@pytest.mark.parametrize("incremental", [True, False])
def test_streamed_answers_are_those_in_one_piece(incremental):
    async def streams(body: dict[str, Any], count: int) -> web.StreamResponse:
        async def events() -> Any:
            for event in events_of(answer(tokens_of(body)), [1, 5], incremental):
                yield event

        return stream(events())

    server, requests = FakeServer(streams), requests_of(3, 4)
    with fleet_of(server) as (fleet, _):
        check(generate(fleet, requests)[0], requests)
    assert all(body["stream"] and body["sampling_params"]["stream_interval"] > 1 for body in server.bodies)


def test_a_response_that_grows_is_not_cut_however_long_it_takes():
    """Twice the timeout in all; between two tokens a twentieth of it."""

    async def crawls(body: dict[str, Any], count: int) -> web.StreamResponse:
        return slowly(answer(tokens_of(body)), 0.05)

    params = SamplingParams(max_tokens=40)
    with fleet_of(FakeServer(crawls), rollout_request_timeout_s=1.0) as (fleet, notes):
        client = SglangClient(fleet, fleet.options, str, lambda: 0)
        samples = client.generate(requests_of(1, 4), params, never)
    assert [sample.length for sample in samples] == [40] * 4 and not notes and "rollout/retries" not in client.counts


@pytest.mark.parametrize("half", [False, True], ids=["from the beginning", "in the middle"])
def test_one_wedged_request_is_sent_again_and_its_server_kept(half):
    wedged: list[int] = []

    async def loses_one(body: dict[str, Any], count: int) -> web.StreamResponse:
        if wedged or body["sampling_params"]["sampling_seed"] != 11:
            return await good(body, count)
        wedged.append(count)

        async def events() -> Any:
            if half:
                yield events_of(answer(tokens_of(body)), [4], incremental=True)[0]
            await asyncio.sleep(60)
            yield {}

        return stream(events())

    requests = requests_of(4, 4)
    with fleet_of(FakeServer(loses_one), rollout_request_timeout_s=0.5) as (fleet, notes):
        samples, client = generate(fleet, requests)
        assert fleet.servers[0].state == "serving" and not notes
    check(samples, requests)
    assert client.counts["rollout/retries"][0] == 1 and wedged


def test_a_wedged_request_is_found_while_its_server_works_on_others():
    """Nothing waits in the server's queue, so a request without a token is not waiting either. The other request ends only
    when the first was sent again."""
    again = asyncio.Event()

    async def behaves(body: dict[str, Any], count: int) -> web.StreamResponse:
        if body["sampling_params"]["sampling_seed"] == 0:
            if count > 2:
                again.set()
                return await good(body, count)
            return await hangs(body, count)

        async def events() -> Any:
            first, *rest = events_of(answer(tokens_of(body)), range(1, 8), incremental=True)
            yield first
            for event in rest[:-1]:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(again.wait()), 0.4)
                yield event
            await again.wait()
            yield rest[-1]

        return stream(events())

    server, requests = FakeServer(behaves), requests_of(1, 2)
    server.waiting = 0
    with fleet_of(server, rollout_request_timeout_s=1.0) as (fleet, notes):
        samples, client = generate(fleet, requests)
    check(samples, requests)
    assert client.counts["rollout/retries"][0] >= 1 and again.is_set() and "/v1/loads" in server.calls


@pytest.mark.parametrize("waiting", [None, 1], ids=["the server does not tell", "the server tells its queue"])
def test_a_request_in_the_queue_of_a_server_at_work_is_not_wedged(waiting):
    """One at a time: the last one waits for longer than the timeout."""
    busy = asyncio.Lock()

    async def one_at_a_time(body: dict[str, Any], count: int) -> web.StreamResponse:
        async def events() -> Any:
            async with busy:
                for event in events_of(answer(tokens_of(body)), range(1, 8), incremental=True):
                    await asyncio.sleep(0.1)
                    yield event

        return stream(events())

    server, requests = FakeServer(one_at_a_time), requests_of(1, 3)
    server.waiting = waiting
    with fleet_of(server, rollout_request_timeout_s=1.0) as (fleet, notes):
        samples, client = generate(fleet, requests)
    check(samples, requests)
    assert len(server.bodies) == 3 and "rollout/retries" not in client.counts and not notes


@pytest.mark.parametrize(
    ("others_heard", "waiting", "seen_idle", "cut", "heard"),
    [
        (4.0, 0, False, True, 1.0),  # nobody at that server was heard in time
        (4.0, 7, False, True, 1.0),  # also where it says that requests wait: nothing moves
        (9.0, None, False, False, 1.0),  # at work, its queue unknown: as soon as nobody is heard
        (9.0, 7, True, False, 10.0),  # at work on a queue: it has as long again
        (9.0, 0, False, False, 10.0),  # the queue is empty now, it may just have left it
        (9.0, 0, True, True, 1.0),  # it had as long again since
    ],
)
def test_which_silent_requests_are_cut(others_heard, waiting, seen_idle, cut, heard):
    """At 10, of a request last heard of at 1, where those before 5 are silent."""

    async def look() -> tuple[bool, float]:
        work = _Round(client, [job], PARAMS, None, 0)
        task: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        work.running = {task: (job, fleet.servers[0])}  # type: ignore[dict-item]
        work.progress = {job.url: others_heard}

        async def queue(url: str) -> int | None:
            return waiting

        work._queue = queue  # type: ignore[method-assign]
        await work._cut_silent(10.0, 5.0)
        return task.cancelled(), job.heard

    with fleet_of(FakeServer()) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, lambda: 0)
        job = Job(0, requests_of(1, 1)[0], url=fleet.servers[0].url, heard=1.0, idle=seen_idle)
        assert asyncio.run(look()) == (cut, heard)


def test_what_is_heard_while_the_server_is_asked_counts():
    async def look() -> bool:
        work = _Round(client, [job], PARAMS, None, 0)
        task: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        work.running = {task: (job, fleet.servers[0])}  # type: ignore[dict-item]
        work.progress = {job.url: 9.0}

        async def queue(url: str) -> int | None:
            job.heard = 9.5
            return 0

        work._queue = queue  # type: ignore[method-assign]
        await work._cut_silent(10.0, 5.0)
        return task.cancelled()

    with fleet_of(FakeServer()) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, lambda: 0)
        job = Job(0, requests_of(1, 1)[0], url=fleet.servers[0].url, heard=1.0, idle=True)
        assert not asyncio.run(look()) and job.heard == 9.5


def test_the_time_of_a_publication_does_not_count():
    """Paused servers decode nothing; that is no reason to give them up."""
    go_on = threading.Event()

    async def waits(body: dict[str, Any], count: int) -> web.StreamResponse:
        while not go_on.is_set():
            await asyncio.sleep(0.02)
        return await good(body, count)

    requests = requests_of(2, 2)
    with fleet_of(FakeServer(waits), rollout_request_timeout_s=0.5) as (fleet, notes):
        fleet.watch(False)

        def ends() -> None:
            go_on.set()
            fleet.watch(True)

        threading.Timer(2.0, ends).start()
        samples, client = generate(fleet, requests)
    check(samples, requests)
    assert "rollout/retries" not in client.counts and not notes


def test_a_server_that_dies_under_its_requests_hands_them_on():
    started = threading.Event()

    async def slow(body: dict[str, Any], count: int) -> web.StreamResponse:
        started.set()
        await asyncio.sleep(30)
        raise AssertionError

    dying, requests = FakeServer(slow), requests_of(6, 4)
    with fleet_of(dying, FakeServer()) as (fleet, _):

        def kill() -> None:
            started.wait()
            dying.stop()

        killer = threading.Thread(target=kill)
        killer.start()
        samples, client = generate(fleet, requests)
        killer.join()
    check(samples, requests)
    assert client.counts["rollout/lost"] == (0.0, 24.0)


def test_a_server_given_up_by_the_health_watch_hands_its_requests_on_at_once():
    async def slow(body: dict[str, Any], count: int) -> web.StreamResponse:
        await asyncio.sleep(100_000)
        raise AssertionError

    requests, hung = requests_of(6, 4), FakeServer(slow)
    with fleet_of(hung, FakeServer()) as (fleet, _):

        def gives_up() -> None:
            while len(hung.bodies) < 12:
                time.sleep(0.01)
            fleet.discard(fleet.servers[0], "no answer to 3 health checks")

        threading.Thread(target=gives_up).start()
        samples, client = generate(fleet, requests)
    check(samples, requests)
    assert client.counts["rollout/rerouted"][0] == 12 and "rollout/retries" not in client.counts


def test_a_straggler_gets_less():
    async def straggles(body: dict[str, Any], count: int) -> web.StreamResponse:
        while len(quick.bodies) < 60:
            await asyncio.sleep(0.01)
        return await good(body, count)

    slow, quick = FakeServer(straggles), FakeServer()
    with fleet_of(slow, quick, rollout_concurrency=4) as (fleet, _):
        check(generate(fleet, requests_of(16, 4))[0], requests_of(16, 4))
    assert len(slow.bodies) == 4 and len(quick.bodies) == 60


def test_a_response_cut_short_goes_on_from_its_tokens():
    async def cuts(body: dict[str, Any], count: int) -> web.StreamResponse:
        if len(body["input_ids"]) > 3:
            return web.json_response(answer(tokens_of(body), version="4"))
        return web.json_response(answer(tokens_of(body)[:5], "abort", version="3"))

    requests = requests_of(2, 2)
    with fleet_of(FakeServer(cuts)) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, Versions(3, 4))
        samples = client.generate(requests, PARAMS, never)
    for sample, request in zip(samples, requests, strict=True):
        whole = {"input_ids": [1, 2, 3], "sampling_params": {"sampling_seed": request.seed, "max_new_tokens": 8}}
        assert sample.token_ids.tolist() == tokens_of(whole) and len(sample.logprobs) == 8
        assert sample.spans == ((3, 0, 5), (4, 5, 8)) and sample.weight_version == 3
        assert sample.finish_reason == "length"
    assert client.counts["rollout/resumed"][0] == 4


class Versions:
    """The current version while weights change: the old one at first, both allowed."""

    def __init__(self, old: int, new: int) -> None:
        self.asked, self.old, self.new = 0, old, new

    def __call__(self) -> int:
        self.asked += 1
        return self.old if self.asked <= 4 else self.new


def test_spans_within_a_reply_are_kept():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 8}]

    async def changes(body: dict[str, Any], count: int) -> web.StreamResponse:
        return web.json_response(answer(tokens_of(body), version="4", weight_versions=spans))

    with fleet_of(FakeServer(changes)) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, Versions(3, 4))
        samples = client.generate(requests_of(1, 4), PARAMS, never)
    assert all(sample.spans == ((3, 0, 2), (4, 2, 8)) and sample.weight_version == 3 for sample in samples)


@pytest.mark.parametrize("version", ["6", "default"])
def test_a_server_with_other_weights_gets_no_more_requests_and_its_answers_are_not_used(version):
    async def old(body: dict[str, Any], count: int) -> web.StreamResponse:
        return web.json_response(answer(tokens_of(body), version=version))

    async def new(body: dict[str, Any], count: int) -> web.StreamResponse:
        return web.json_response(answer(tokens_of(body), version="7"))

    stale = FakeServer(old)
    with fleet_of(stale, FakeServer(new), rollout_concurrency=2) as (fleet, notes):
        samples, _ = generate(fleet, requests_of(8, 4), version=7)
        assert fleet.servers[0].state == "stale" and "no more requests before the next publication" in notes[0]
    assert {sample.weight_version for sample in samples} == {7} and len(stale.bodies) <= 2


def test_when_all_servers_are_gone_the_work_waits_for_a_new_one():
    requests, found = requests_of(4, 4), []
    with fleet_of(FakeServer(five_hundred), FakeServer()) as (fleet, _):
        fleet.mark_stale(fleet.servers[1], "comes later")

        def find() -> None:
            found.append(True)
            fleet.published([fleet.servers[1]])

        samples, _ = generate(fleet, requests, find)
    check(samples, requests)
    assert found == [True]


def test_a_sample_that_nobody_can_give_is_lost_and_counted():
    async def picky(body: dict[str, Any], count: int) -> web.StreamResponse:
        if body["sampling_params"]["sampling_seed"] == 12:
            return web.json_response({"error": "too long for me"}, status=400)
        return await good(body, count)

    requests = requests_of(8, 4)
    with fleet_of(FakeServer(picky), rollout_max_retries=1) as (fleet, _):
        samples, client = generate(fleet, requests)
    lost = [request.seed for request, s in zip(requests, samples, strict=True) if s.finish_reason == "abort"]
    assert lost == [12] and client.counts["rollout/lost"] == (1.0, 32.0)


def test_when_every_request_fails_the_run_stops_with_the_servers_reason():
    with (
        fleet_of(FakeServer(four_hundred), rollout_max_retries=0) as (fleet, _),
        pytest.raises(InputError, match="all 2 requests to the SGLang servers failed.*answered 400.*no"),
    ):
        generate(fleet, requests_of(1, 2))


def test_when_the_router_is_down_requests_go_to_the_servers():
    requests = requests_of(4, 4)
    with fleet_of(FakeServer(), FakeServer(), rollout_router_url="http://127.0.0.1:9") as (fleet, notes):
        samples, _ = generate(fleet, requests)
        assert all(server.state == "serving" for server in fleet.servers)
    check(samples, requests)
    assert notes == [notes[0]] and "router http://127.0.0.1:9 does not answer" in notes[0]


def test_the_router_deals_out_where_there_is_one():
    router, server = FakeServer(), FakeServer()
    with router, fleet_of(server, rollout_router_url=router.url) as (fleet, _):
        check(generate(fleet, requests_of(2, 2))[0], requests_of(2, 2))
    assert len(router.bodies) == 4 and not server.bodies


def test_an_error_in_the_middle_leaves_no_request_booked():
    async def slow(body: dict[str, Any], count: int) -> web.StreamResponse:
        await asyncio.sleep(0.05 * count)
        return await good(body, count)

    with fleet_of(FakeServer(slow)) as (fleet, _):
        client = SglangClient(fleet, fleet.options, str, lambda: 0)
        with pytest.raises(KeyboardInterrupt):
            client.generate(requests_of(2, 4), PARAMS, never, on_finish=interrupt)
        assert fleet.servers[0].running == 0 and fleet.servers[0].outstanding == 0


def interrupt(_: int) -> None:
    raise KeyboardInterrupt
