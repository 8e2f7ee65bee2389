"""What counts as an answer of SGLang, what it means, and what a request says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_sglang import answer
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.servers.replies import parse_reply, request_body
from megatron_dapo.types import Prompt, Request, SamplingParams

REQUEST = Request(Prompt("p", "", (5, 6), "", ""), seed=7)
STOPS = (98, 99)


def finished(token_ids: list[int], reason: str, **given: Any) -> dict[str, Any]:
    return answer(token_ids, finish_reason={"type": reason, **given})


def test_a_good_answer():
    reply = parse_reply(answer([3, 99], "stop", "12"), 5, STOPS)
    assert reply.token_ids == [3, 99] and reply.logprobs == [-0.03, -0.99] and reply.finish_reason == "stop"
    assert reply.spans == ((12, 0, 2),)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize(
    ("token_ids", "meaning"),
    [
        ([4, 5, 6, 99], "stop"),
        ([4, 5, 6, 7, 8, 9, 10, 98], "stop"),
        ([99], "stop"),
        ([4, 5, 6, 7, 8, 9, 10, 11], "length"),
    ],
    ids=["stop id", "stop id as the last token of the budget", "stop id alone", "whole budget"],
)
def test_a_finished_answer_is_finished_whatever_its_reason(reason, token_ids, meaning):
    assert parse_reply(finished(token_ids, reason), 8, STOPS).finish_reason == meaning


def test_a_request_says_how_to_draw():
    """All of it: what is left out, a checkpoint's generation_config.json decides."""
    params = SamplingParams(10, temperature=0.6, top_p=0.9, top_k=20, stop_token_ids=STOPS)
    body = request_body(REQUEST, [8, 9], params)
    sampling = body["sampling_params"]
    expected = {
        "max_new_tokens": 8, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "stop_token_ids": [98, 99], "ignore_eos": False,
        "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
        "no_stop_trim": True, "n": 1, "sampling_seed": 7,
    }  # fmt: skip
    assert {name: sampling[name] for name in expected} == expected
    assert body["input_ids"] == [5, 6, 8, 9] and body["return_logprob"] is True


def test_log_probs_of_other_ids_are_none():
    wrong = answer([3, 4, 99], "stop")
    wrong["meta_info"]["output_token_logprobs"][1][1] = 5
    with pytest.raises(ValueError, match="3 ids and log-probs of 3 others"):
        parse_reply(wrong, 5, STOPS)


def test_an_answer_cut_short_goes_on_and_says_why():
    reply = parse_reply(finished([4, 5], "abort", message="out of memory"), 8, STOPS)
    assert reply.finish_reason == "abort" and reply.token_ids == [4, 5] and reply.message == "out of memory"
    reply = parse_reply(finished([], "abort"), 8, STOPS)
    assert reply.finish_reason == "abort" and reply.token_ids == [] and reply.spans == ()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (finished([4, 5], "length"), "ended after 2 of 8 tokens"),
        (finished([4, 7], "stop", matched=7), r"stopped at id 7.*\[98, 99\].*--rollout-stop-token-ids"),
        (finished([4, 5], "stop", matched=99), "the stop id 99 was cut off"),
        (finished([4, 99], "stop", matched="NaN happened"), "stopped at 'NaN happened'"),
        (finished([4, 99, 5], "abort"), "tokens after a stop id"),
        (finished([4, 99, 99], "stop"), "tokens after a stop id"),
        (finished([4, 98, 5, 6, 7, 8, 9, 10], "length"), "tokens after a stop id"),
        (finished([4] * 9, "length"), "9 tokens where 8 were asked for"),
        (finished([4] * 9, "abort"), "9 tokens where 8 were asked for"),
        (finished([], "stop", matched=7), "stopped at id 7"),
        (finished([], "length"), "ended after 0 of 8 tokens"),
        (finished([4, 99], "timeout"), "finish reason 'timeout'"),
    ],
)
def test_an_answer_to_another_request_is_none(wrong, says):
    with pytest.raises(ValueError, match=says):
        parse_reply(wrong, 8, STOPS)


@given(
    st.lists(st.sampled_from([4, 5, 98, 99]), max_size=10),
    st.sampled_from(["stop", "length", "abort"]),
    st.integers(1, 9),
)
def test_what_an_answer_means_follows_from_its_tokens_and_its_request(token_ids, reason, most):
    """Of every answer: it ends in the first stop id, or it fills the budget, or it has to go on and can."""
    try:
        reply = parse_reply(finished(token_ids, reason), most, STOPS)
    except ValueError:
        return
    ended = bool(token_ids) and token_ids[-1] in STOPS
    assert not set(token_ids[:-1]) & set(STOPS) and len(token_ids) <= most
    assert reply.finish_reason == ("stop" if ended else "length" if len(token_ids) == most else "abort")
    if reply.finish_reason == "abort":
        body = request_body(REQUEST, token_ids, SamplingParams(most, stop_token_ids=STOPS))
        assert body["sampling_params"]["max_new_tokens"] == most - len(token_ids) > 0


def test_no_request_asks_for_nothing():
    with pytest.raises(AssertionError):
        request_body(REQUEST, [8, 9], SamplingParams(2))


def test_a_server_that_never_got_weights_has_version_minus_one():
    assert parse_reply(answer([3], version="default"), most=1).spans == ((-1, 0, 1),)


@pytest.mark.parametrize("token", [50, 2**31, 2**40, -1, 3.0, True, "3", None, [3], float("nan")], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_id_outside_the_vocabulary_is_no_answer(token, place):
    """50 tokens: also what a JSON number can be beside an id."""
    token_ids: list[Any] = [3, 4, 5]
    assert parse_reply(answer(token_ids), 3, vocab_size=50).token_ids == token_ids
    token_ids[place] = token
    wrong = answer([3, 4, 5], output_token_logprobs=[[-0.1, token, None] for token in token_ids])
    wrong["output_ids"] = token_ids
    with pytest.raises((ValueError, TypeError)):
        parse_reply(wrong, 3, vocab_size=50)


@pytest.mark.parametrize(
    "logprob",
    [float("nan"), float("inf"), float("-inf"), -1e300, 0.5, 1, 2e-3, True, "-0.1", None, [-0.1]],
    ids=str,
)
def test_what_is_no_logprob(logprob):
    with pytest.raises((ValueError, TypeError)):
        parse_reply(answer([1, 2], output_token_logprobs=[[-0.1, 1, None], [logprob, 2, None]]), most=2)


def test_a_logprob_above_0_by_rounding_is_0():
    entries = [[1e-7, 1, None], [-1, 2, None], [0, 3, None]]
    assert parse_reply(answer([1, 2, 3], output_token_logprobs=entries), most=3).logprobs == [0.0, -1, 0]


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([span("3", 0, 4)], ((3, 0, 4),)),
        ([span("3", 0, 1), span("4", 1, 4)], ((3, 0, 1), (4, 1, 4))),
        ([span("3", 0, 0), span("4", 0, 4)], ((4, 0, 4),)),
        ([span("default", 0, 2), span("4", 2, 4)], ((-1, 0, 2), (4, 2, 4))),
    ],
)
def test_versions_cover_the_tokens(spans, found):
    assert parse_reply(answer([1, 2, 3, 4], weight_versions=spans), most=4).spans == found


@pytest.mark.parametrize(
    "spans",
    [
        [span("3", 0, 3)],
        [span("3", 0, 5)],
        [span("3", 1, 4)],
        [span("3", 0, 1), span("4", 2, 4)],
        [span("3", 0, 3), span("4", 2, 4)],
        [span("3", 2, 4), span("4", 0, 2)],
        [span("3", 0, 6), span("4", 6, 4)],
        [span("3", 0, 4.0)],
        [span("3", False, 4)],
        [span("3", 0, "4")],
        [span("3", -1, 4)],
        [span("3", 0, None)],
        [{"version": "3"}],
        ["3"],
        {"3": [0, 4]},
        7,
    ],
    ids=str,
)
def test_versions_that_do_not_cover_the_tokens_are_no_answer(spans):
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_reply(answer([1, 2, 3, 4], weight_versions=spans), most=4)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        [],
        "text",
        {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "0"}},
        {"output_ids": [1], "meta_info": None},
        answer([1], output_token_logprobs=[[-0.1, 2, None]]),
        answer([1], output_token_logprobs=[[-0.1, 1, None]] * 2),
        answer([1], output_token_logprobs=[[]]),
        answer([1], output_token_logprobs=7),
        answer([1], finish_reason="stop"),
        answer([1], finish_reason={}),
        answer([1], cached_tokens=-1),
        answer([1], prompt_tokens="3"),
        {**answer([1]), "output_ids": {"0": 1}},
        {**answer([1]), "output_ids": "1"},
        {**answer([1]), "output_ids": None},
    ],
    ids=lambda broken: json.dumps(broken)[:60],
)
def test_what_is_no_answer(broken):
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        parse_reply(broken, most=2)


def test_a_request_goes_on_behind_its_tokens():
    body = request_body(REQUEST, [8, 9], SamplingParams(10))
    assert body["input_ids"] == [5, 6, 8, 9] and body["sampling_params"]["max_new_tokens"] == 8
    assert body["sampling_params"]["ignore_eos"] and body["return_logprob"]
    assert not request_body(REQUEST, [], SamplingParams(10, stop_token_ids=(2,)))["sampling_params"]["ignore_eos"]
