"""SGLang's control plane over HTTP, as much of it as we use: one call to one server, or the same call to all at once.

Requests that generate take another road (``servers.client``); these are few, small, and must not fail quietly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import requests


class ServerError(RuntimeError):
    """A server refused, answered nonsense or did not answer; the message names it, the call and what it said."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(f"{url}{what}")
        self.url = url


def call(url: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
    """POST ``body`` (GET without one); the JSON that came back, or its text.

    Raises:
        ServerError: no connection, no answer in ``timeout_s`` seconds, a status other than 200, or ``success: false``.
    """
    try:
        if body is None:
            reply = requests.get(url + path, timeout=timeout_s)
        else:
            reply = requests.post(url + path, json=body, timeout=timeout_s)
    except requests.RequestException as error:
        raise ServerError(url, f"{path}: {type(error).__name__}") from None
    try:
        answer = reply.json()
    except json.JSONDecodeError:
        answer = reply.text
    refused = isinstance(answer, dict) and answer.get("success") is False
    if reply.status_code != 200 or refused:
        raise ServerError(url, f"{path} answered {reply.status_code}: {str(answer)[:300]}")
    return answer


def call_each(
    urls: Sequence[str],
    path: str,
    body: Callable[[int], Mapping[str, Any]] | Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """The same call to every server at once; what each answered, or the ServerError it raised. ``body`` may depend on the
    server's index."""
    with ThreadPoolExecutor(max_workers=max(len(urls), 1)) as pool:
        futures = begin_each(pool, urls, path, body, timeout_s)
        return {url: outcome(future) for url, future in futures.items()}


def begin_each(
    pool: ThreadPoolExecutor,
    urls: Sequence[str],
    path: str,
    body: Callable[[int], Mapping[str, Any]] | Mapping[str, Any] | None,
    timeout_s: float,
) -> dict[str, Future[Any]]:
    """Start the calls of ``call_each`` and return at once."""
    return {
        url: pool.submit(call, url, path, body(index) if callable(body) else body, timeout_s)
        for index, url in enumerate(urls)
    }


def outcome(future: Future[Any]) -> Any:
    """A future's answer, or the ServerError it ended with."""
    try:
        return future.result()
    except ServerError as error:
        return error


def failures(answers: Mapping[str, Any]) -> dict[str, ServerError]:
    """The servers of ``call_each`` that failed."""
    return {url: answer for url, answer in answers.items() if isinstance(answer, ServerError)}


def pause(urls: Sequence[str], mode: str) -> dict[str, Any]:
    """Stop decoding. ``abort`` ends the requests under way with what they have; ``retract`` and ``in_place`` keep them for
    ``resume``, the former without their caches."""
    return call_each(urls, "/pause_generation", {"mode": mode})


def resume(urls: Sequence[str]) -> dict[str, Any]:
    """Go on decoding after ``pause``."""
    return call_each(urls, "/continue_generation", {})


def logprobs_of(url: str, token_ids: Sequence[int], timeout_s: float = 60.0) -> list[float]:
    """Log-probs that a server gives to each of ``token_ids`` after the first, at temperature 1.

    Raises:
        ServerError: it does not answer, or not with a finite number for each.
    """
    body = {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = call(url, "/generate", body, timeout_s)
    try:
        found = [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerError(url, f"/generate gave no log-probs ({type(error).__name__} {error})") from None
    if len(found) != len(token_ids) - 1 or not all(map(math.isfinite, found)):
        raise ServerError(url, f"/generate gave {len(found)} log-probs to {len(token_ids)} tokens, or infinite ones")
    return found
