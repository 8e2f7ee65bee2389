"""Streamed answers are put together as they would have come in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_sglang import answer, events_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.servers.replies import parse_reply
from megatron_dapo.servers.streaming import Assembly

SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 9}]
WHOLE = answer(list(range(1, 10)), "length", "4", weight_versions=SPANS)


def assembled(events: list[dict[str, Any]]) -> tuple[Any, list[bool]]:
    assembly = Assembly()
    progress = [assembly.add(json.dumps(event).encode()) for event in events]
    return assembly.answer(), progress


@given(st.sets(st.integers(1, 8)), st.booleans())
def test_any_cut_gives_the_answer_in_one_piece(cuts, incremental):
    found, progress = assembled(events_of(WHOLE, sorted(cuts), incremental))
    assert parse_reply(found, 9) == parse_reply(WHOLE, 9) and all(progress)


@pytest.mark.parametrize("incremental", [False, True])
def test_an_event_without_a_new_token_is_no_progress(incremental):
    first, second, last = events_of(WHOLE, [4, 7], incremental)
    nothing = [] if incremental else second["output_ids"]
    again = {**second, "output_ids": nothing}
    again["meta_info"] = {
        **second["meta_info"],
        "output_token_logprobs": second["meta_info"]["output_token_logprobs"][: len(nothing)],
    }
    found, progress = assembled([first, second, again, again, last])
    assert progress == [True, True, False, False, True] and found["output_ids"] == WHOLE["output_ids"]


@pytest.mark.parametrize("cuts", [[], [1], [1, 4]])
@pytest.mark.parametrize("together", [False, True], ids=["an event of its own", "with the tokens before"])
def test_a_request_cut_short_in_the_queue(cuts, together):
    """It ends with all log-probs so far but the last id alone, also where the rest comes by what is new; SGLang may put that
    into one event with what came just before."""
    *events, last = events_of(answer([5, 6, 7, 8, 9], "abort"), cuts, incremental=True)
    entries = answer([5, 6, 7, 8, 9])["meta_info"]["output_token_logprobs"]
    ids = [*last["output_ids"], 9] if together else [9]
    before = last["meta_info"]["output_token_logprobs"] if together else []
    if not together:
        events.append({**last, "meta_info": {**last["meta_info"], "finish_reason": None}})
    end = {"output_ids": ids, "meta_info": {**last["meta_info"], "output_token_logprobs": [*before, *entries]}}
    found, _ = assembled([*events, end])
    reply = parse_reply(found, 8)
    assert reply.token_ids == [5, 6, 7, 8, 9] and reply.finish_reason == "abort" and len(reply.logprobs) == 5


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_stream_that_breaks_off_is_no_answer(incremental, length):
    assembly = Assembly()
    for event in events_of(WHOLE, [3, 6], incremental)[:length]:
        assembly.add(json.dumps(event).encode())
    with pytest.raises(ValueError, match="a stream without an event" if not length else "the stream broke off"):
        assembly.answer()


def test_an_event_that_is_lost_is_noticed():
    first, _, last = events_of(WHOLE, [3, 6], incremental=True)
    with pytest.raises(ValueError, match="6 tokens arrived of 9"):
        assembled([first, last])


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (b'{"error": {"message": "too long"}}', "the server says: .*too long"),
        (b"<html>", "no JSON: b'<html>'"),
        (b"7", ""),
        (b'{"output_ids": [1]}', "meta_info"),
        (b'{"output_ids": [1], "meta_info": {"completion_tokens": true}}', "True is no count"),
        (b'{"output_ids": 1, "meta_info": {"completion_tokens": 1}}', ""),
    ],
)
def test_what_is_no_event(event, says):
    with pytest.raises((ValueError, KeyError, TypeError), match=says):
        Assembly().add(event)
