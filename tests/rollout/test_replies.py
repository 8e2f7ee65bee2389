"""What counts as an answer of SGLang, and what a request says."""

from __future__ import annotations

import pytest
from fake_sglang import answer

from megatron_dapo.rollout.replies import parse_reply, request_body
from megatron_dapo.types import Prompt, Request, SamplingParams

REQUEST = Request(Prompt("p", "", (5, 6), "", ""), seed=7)


def test_a_good_answer():
    reply = parse_reply(answer([3, 4], "stop", "12"), most=2)
    assert reply.token_ids == [3, 4] and reply.logprobs == [-0.03, -0.04] and reply.finish_reason == "stop"
    assert reply.spans == ((12, 0, 2),)


def test_an_aborted_answer_may_be_empty_and_says_why():
    raw = answer([], version="3")
    raw["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
    reply = parse_reply(raw, most=5)
    assert reply.finish_reason == "abort" and reply.message == "out of memory" and reply.spans == ()


def test_a_server_that_never_got_weights_has_version_minus_one():
    assert parse_reply(answer([3], version="default"), most=1).spans == ((-1, 0, 1),)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "0"}},
        answer([], "stop"),
        answer([1, 2, 3], "length"),
        answer([1], "timeout"),
        answer([1], output_token_logprobs=[[-0.1, 2, None]]),
        answer([1], output_token_logprobs=[[float("-inf"), 1, None]]),
        answer([1], output_token_logprobs=[[0.5, 1, None]]),
        answer([1], output_token_logprobs=[[None, 1, None]]),
    ],
)
def test_what_is_no_answer(broken):
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_reply(broken, most=2)


def test_a_request_goes_on_behind_its_tokens():
    body = request_body(REQUEST, [8, 9], SamplingParams(10))
    assert body["input_ids"] == [5, 6, 8, 9] and body["sampling_params"]["max_new_tokens"] == 8
    assert body["sampling_params"]["ignore_eos"] and body["return_logprob"]
    assert not request_body(REQUEST, [], SamplingParams(10, stop_token_ids=(2,)))["sampling_params"]["ignore_eos"]
