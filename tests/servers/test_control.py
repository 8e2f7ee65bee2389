"""Control calls: what a server says is checked before anything relies on it."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from fake_sglang import FakeServer

from megatron_dapo.servers.control import ServerError, logprobs_of


def scorer(*logprobs: Any) -> FakeServer:
    """A server that gives these log-probs to whatever it is asked."""

    async def scores(body: dict[str, Any], count: int) -> web.StreamResponse:
        return web.json_response({"meta_info": {"input_token_logprobs": [[x, 1, None] for x in logprobs]}})

    return FakeServer(scores)


def test_logprobs_of_a_prompt():
    with scorer(None, -0.5, -1) as server:
        assert logprobs_of(server.url, [1, 2, 3]) == [-0.5, -1.0]


@pytest.mark.parametrize(
    "logprobs",
    [
        (None, -0.5),
        (None, -0.5, -1.0, -2.0),
        (),
        (None, float("nan"), -1.0),
        (None, -0.5, float("nan")),
        (None, float("-inf"), -1.0),
        (None, None, -1.0),
        (None, "x", -1.0),
        (None, [], -1.0),
    ],
    ids=str,
)
def test_what_is_no_logprob_of_a_prompt_is_the_servers_fault(logprobs):
    """NaN compares as smaller than every tolerance, so it must not get that far."""
    with scorer(*logprobs) as server, pytest.raises(ServerError, match="/generate gave"):
        logprobs_of(server.url, [1, 2, 3])


@pytest.mark.parametrize(
    "said", [{}, [], {"meta_info": {}}, {"meta_info": {"input_token_logprobs": 7}}, "text"], ids=str
)
def test_an_answer_without_logprobs_is_the_servers_fault(said):
    async def says(body: dict[str, Any], count: int) -> web.StreamResponse:
        return web.json_response(said)

    with FakeServer(says) as server, pytest.raises(ServerError, match="gave no log-probs"):
        logprobs_of(server.url, [1, 2, 3])
