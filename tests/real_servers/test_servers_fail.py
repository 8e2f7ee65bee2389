"""Real servers that are paused, refused a bucket, killed: every sample is accounted for, every fault is noticed by itself.

In the order of the damage done; ``serve`` starts a killed server again for the next test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from distributed_helper import run_ranks
from served import LAYERS, UP_S, listener
from test_publish import engine_of
from tolerances import assert_same_logprobs

from megatron_dapo.servers import control
from megatron_dapo.servers import publish as publishing
from megatron_dapo.servers.control import logprobs_of
from megatron_dapo.servers.engine import SglangEngine
from megatron_dapo.training.probe import TrainerProbe
from megatron_dapo.types import InputError, Prompt, Request, SamplingParams

PARAMS = SamplingParams(100, temperature=1.0)
QUICK = ("--server-health-interval-s", "0.5", "--weight-update-timeout-s", "20")
PATIENT = ("--server-health-interval-s", "0.5", "--weight-update-timeout-s", "100000")
"""Who only notices a fault by this limit hangs, and the ranks' deadline ends the test."""


def requests_of(prompts: int = 8, samples: int = 4) -> list[Request]:
    made = [Prompt(f"p{i}", "", (3 + i, 4, 5, 6), "", "") for i in range(prompts)]
    return [Request(prompt, 100 * i + j) for i, prompt in enumerate(made) for j in range(samples)]


def in_background(engine: SglangEngine, requests: list[Request]) -> tuple[threading.Thread, list[Any]]:
    samples: list[Any] = []
    thread = threading.Thread(target=lambda: samples.extend(engine.generate(requests, PARAMS)))
    thread.start()
    return thread, samples


def whole(samples: list[Any], requests: list[Request]) -> None:
    """A whole response for every request."""
    assert len(samples) == len(requests)
    for sample in samples:
        assert sample.length == 100 and len(sample.logprobs) == 100 and sample.finish_reason == "length"


def agree(engine: SglangEngine, trainer: Any) -> None:
    """Every server that gets requests holds what the trainer holds."""
    tokens = TrainerProbe(trainer).tokens
    expected = TrainerProbe(trainer).logprobs()
    assert engine.fleet is not None and engine.fleet.serving()
    for server in engine.fleet.serving():
        assert_same_logprobs(LAYERS, logprobs_of(server.url, tokens), expected)


def until(holds: Any, seconds: float, every: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(every)


def until_sent(engine: SglangEngine, urls: list[str]) -> None:
    """Wait until each of these servers has requests of the client under way."""
    assert engine.fleet is not None
    chosen = [server for server in engine.fleet.servers if server.url in urls]
    until(lambda: all(server.running for server in chosen), UP_S, every=0.001)


def all_up(engine: SglangEngine) -> None:
    """Wait until both servers can be published to."""
    assert engine.fleet is not None
    until(lambda: len(engine.fleet.healthy()) == 2, UP_S)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_weights_change_under_running_requests(tmp_path, checkpoint, servers, mode):
    """Every response is whole, its log-probs are those of the versions it names, whatever the mode does to it."""

    def work() -> None:
        flags = ("--weight-update-mode", mode, "--rollout-mode", "async")
        trainer, engine = engine_of(tmp_path, checkpoint, servers, *flags)
        engine.publish(0)
        requests, mixed, version = requests_of(), [], 0
        while not mixed:  # the publication met them neither before their first token nor after their last
            thread, samples = in_background(engine, requests)
            until_sent(engine, servers)
            time.sleep(0.02 * version)  # from one attempt to the next a little later, whatever the servers' speed
            version += 1
            engine.publish(version)
            thread.join()
            whole(samples, requests)
            pairs = zip(samples, requests, strict=True)
            mixed = [(sample, request) for sample, request in pairs if len(sample.spans) > 1]
        for sample, _ in mixed:
            assert sample.weight_version == version - 1
            assert [span[0] for span in sample.spans] == [version - 1, version]
            assert sample.spans[0][1] == 0 and sample.spans[0][2] == sample.spans[1][1] and sample.spans[1][2] == 100
        # both versions have the same weights here, so one re-scoring fits all tokens
        sample, request = mixed[0]
        again = logprobs_of(servers[0], [*request.prompt.token_ids, *sample.token_ids.tolist()])
        assert_same_logprobs(LAYERS, sample.logprobs, again[len(request.prompt.token_ids) - 1 :])
        assert engine.report()["rollout/lost"][0] == 0
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S)


def test_a_rollout_that_ends_while_servers_are_paused(tmp_path, checkpoint, servers):
    def work() -> None:
        _, engine = engine_of(tmp_path, checkpoint, servers)
        engine.publish(0)
        requests = requests_of(2, 4)
        thread, samples = in_background(engine, requests)
        control.pause(servers, "retract")
        time.sleep(1.0)
        assert not samples
        control.resume(servers)
        thread.join(UP_S)
        whole(samples, requests)
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S)


def test_a_bucket_that_a_server_cannot_load_is_an_error_at_once(tmp_path, checkpoint, servers, monkeypatch):
    """It answers 400 after the broadcast. The publication begins anew, with the servers as they come back."""

    def work() -> None:
        trainer, engine = engine_of(tmp_path, checkpoint, servers, *PATIENT)
        engine.publish(0)
        announce, spoiled = engine.publisher._announce, []

        def spoils_one(bucket: Any, version: str | None) -> dict[str, Any]:
            body = announce(bucket, version)
            if not spoiled:
                spoiled.append(True)
                body = {**body, "names": [name.replace("q_proj", "q_prog") for name in body["names"]]}
            return body

        monkeypatch.setattr(engine.publisher, "_announce", spoils_one)
        engine.publish(1)
        assert spoiled
        agree(engine, trainer)
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S)


def test_a_bucket_refused_before_its_broadcast_does_not_hang(tmp_path, checkpoint, servers, monkeypatch):
    """Outside a session a server answers 400 at once and never joins the broadcast."""

    def work() -> None:
        trainer, engine = engine_of(tmp_path, checkpoint, servers, *PATIENT)
        engine.publish(0)
        each, skipped = publishing.call_each, []

        def forgets_once(urls: Any, path: str, *rest: Any) -> Any:
            if path == "/begin_weight_update" and not skipped:
                skipped.append(True)
                return {}
            return each(urls, path, *rest)

        monkeypatch.setattr(publishing, "call_each", forgets_once)
        engine.publish(1)
        assert skipped
        agree(engine, trainer)
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S)


def test_weights_that_did_not_arrive_are_found_by_the_probe(tmp_path, checkpoint, servers, monkeypatch):
    """A tensor that is sent wrong every time: no server gets a request, and the message says by how much it is off."""

    def work() -> str:
        _, engine = engine_of(tmp_path, checkpoint, servers, *QUICK, "--server-start-timeout-s", "20")
        stream = engine.publisher.weights.tensors

        def wrong() -> Any:
            for name, tensor in stream():
                yield name, tensor * 1.5 if "up_proj" in name else tensor

        monkeypatch.setattr(engine.publisher.weights, "tensors", wrong)
        with pytest.raises(InputError) as caught:
            engine.publish(1)
        assert engine.fleet is not None and engine.fleet.serving() == []
        engine.close()
        return str(caught.value)

    (message,) = run_ranks(work, 1, deadline_s=500)
    assert "log-probs of the probe differ by" in message and "--weight-probe-tolerance" in message


def test_a_paused_server_that_was_given_up_comes_back(tmp_path, checkpoint, servers):
    """Paused, it answers no health check: what nobody lets go on would be lost for good."""

    def work() -> None:
        trainer, engine = engine_of(tmp_path, checkpoint, servers, *QUICK)
        assert engine.fleet is not None
        engine.publish(0)
        with engine.fleet.unwatched():
            time.sleep(2)  # health checks under way end here
            control.pause(servers[1:], "retract")
            time.sleep(1.5)  # and nothing that the server has still to say can pass for the answer to the next one
            engine.fleet.discard(engine.fleet.servers[1], "for this test")
        until(lambda: len(engine.fleet.healthy()) == 2, UP_S)
        engine.publish(1)
        agree(engine, trainer)
        assert len(engine.fleet.serving()) == 2
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S)


def kill(url: str) -> None:
    os.kill(listener(url), signal.SIGKILL)


def test_a_server_killed_while_it_generates(tmp_path, checkpoint, servers):
    def work() -> None:
        trainer, engine = engine_of(tmp_path, checkpoint, servers, *QUICK)
        all_up(engine)
        engine.publish(0)
        requests = requests_of()
        thread, samples = in_background(engine, requests)
        until_sent(engine, servers[1:])
        kill(servers[1])
        thread.join(UP_S)
        whole(samples, requests)
        assert engine.fleet is not None and [s.url for s in engine.fleet.serving()] == servers[:1]
        report = engine.report()
        assert report["rollout/lost"][0] == 0
        assert report.get("rollout/retries", (0, 0))[0] + report.get("rollout/rerouted", (0, 0))[0] >= 1
        all_up(engine)  # it comes back, without the weights, and gets them with all others
        engine.publish(1)
        assert len(engine.fleet.serving()) == 2
        agree(engine, trainer)
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S + 100)


def test_a_server_killed_during_a_publication(tmp_path, checkpoint, servers, monkeypatch):
    def work() -> None:
        trainer, engine = engine_of(tmp_path, checkpoint, servers, *PATIENT)
        all_up(engine)
        engine.publish(0)
        begin, killed = publishing.begin_broadcast, []

        def kills_first(*args: Any) -> Any:
            if not killed:
                killed.append(True)
                kill(servers[1])
            return begin(*args)

        monkeypatch.setattr(publishing, "begin_broadcast", kills_first)
        engine.publish(1)
        assert killed
        assert engine.fleet is not None and servers[0] in [s.url for s in engine.fleet.serving()]
        agree(engine, trainer)
        requests = requests_of(2, 2)
        whole(engine.generate(requests, PARAMS), requests)
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S + 100)


def test_when_the_only_server_is_killed_the_step_waits_for_it_and_loses_nothing(tmp_path, checkpoint, servers):
    """It comes back with the weights it began with; they are published again in the middle of the step."""

    def work() -> None:
        trainer, engine = engine_of(tmp_path, checkpoint, servers[:1], *QUICK, "--server-start-timeout-s", str(UP_S))
        engine.publish(3)
        requests = requests_of()
        threading.Thread(target=lambda: until_sent(engine, servers[:1]) or kill(servers[0])).start()
        samples = engine.generate(requests, PARAMS)
        whole(samples, requests)
        assert {sample.weight_version for sample in samples} == {3}
        agree(engine, trainer)
        engine.close()

    run_ranks(work, 1, deadline_s=UP_S + 100)
