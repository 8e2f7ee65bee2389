"""What a request to SGLang says and what makes an answer one: pure, no network.

What a reply means follows from its tokens and its request, never from the reason it gives alone. With S the request's stop
ids and n the tokens it may still use:

    the last token is in S                        the response is finished: "stop", whatever the reason
    n tokens                                      finished: "length", whatever the reason
    fewer, and the reason is "abort"              cut short: goes on from its tokens
    fewer, "length" or "stop"                     no answer: the server has a lower limit, or other stop ids, than the request
    more than n, or an id of S before the last    no answer
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dapo.types import FinishReason, Request, SamplingParams

STREAM_INTERVAL = 128
"""Tokens between two signs of life of a request. Fewer cost the client time: an event is as dear as 100 tokens."""

ROUNDING = 1e-3
"""A log-prob may be this far above 0 by rounding; it counts as 0."""

ID_LIMIT = 2**31
"""Ids are below this where nobody says how large the vocabulary is."""


@dataclass(frozen=True)
class Reply:
    """A checked answer: ids, a log-prob each, what it means, and (version, begin, end) of the weights behind the tokens.
    Its ``finish_reason`` is "abort" only where the response has to go on."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    spans: tuple[tuple[int, int, int], ...]
    message: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0


def request_body(request: Request, so_far: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """The body of ``/generate``. Every sampling parameter is sent: what is left out, a checkpoint's generation_config.json
    decides (a repetition penalty, say), and log-probs no longer belong to what was sampled."""
    most = params.max_tokens - len(so_far)
    assert most > 0, f"{len(so_far)} of {params.max_tokens} tokens: the response is finished"
    return {
        "input_ids": [*request.prompt.token_ids, *so_far],
        "sampling_params": {
            "max_new_tokens": most,
            "min_new_tokens": 0,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": None,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "n": 1,
            "stream_interval": STREAM_INTERVAL,
            "sampling_seed": request.seed,  # heeded by servers with --enable-deterministic-inference
        },
        "return_logprob": True,
        "stream": True,
    }


def parse_reply(answer: Any, most: int, stop_token_ids: Sequence[int] = (), vocab_size: int = ID_LIMIT) -> Reply:
    """Check an answer of ``/generate`` to a request for at most ``most`` tokens that ends at ``stop_token_ids``.

    Raises:
        ValueError, KeyError, TypeError: it is not one: something is missing or of another type, an id lies outside the
            vocabulary, ids and log-probs disagree, a log-prob is none, versions do not cover the tokens, or its tokens are
            not what the request asked for.
    """
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    finish = {"type": "abort", "message": "no reason given"} if meta["finish_reason"] is None else meta["finish_reason"]
    entries = meta.get("output_token_logprobs") or []
    _check_ids(token_ids, vocab_size)
    if [entry[1] for entry in entries] != token_ids:
        raise ValueError(f"{len(token_ids)} ids and log-probs of {len(entries)} others")
    return Reply(
        token_ids=token_ids,
        logprobs=_logprobs([entry[0] for entry in entries]),
        finish_reason=_meaning(token_ids, finish, most, frozenset(stop_token_ids)),
        spans=_spans(meta, len(token_ids)),
        message=str(finish.get("message", "")),
        cached_tokens=count_of(meta.get("cached_tokens", 0)),
        prompt_tokens=count_of(meta.get("prompt_tokens", 0)),
    )


def _check_ids(token_ids: Any, vocab_size: int) -> None:
    if not isinstance(token_ids, list) or not set(map(type, token_ids)) <= {int}:
        raise TypeError("output_ids is no list of integers")
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"ids {min(token_ids)} .. {max(token_ids)} outside the vocabulary 0 .. {vocab_size - 1}")


def _logprobs(values: list[Any]) -> list[float]:
    if not set(map(type, values)) <= {float, int}:
        raise TypeError("a log-prob that is no number")
    with np.errstate(over="ignore"):
        found = np.array(values, dtype=np.float32)  # as they are kept
    if not np.isfinite(found).all() or found.max(initial=0.0) > ROUNDING:
        raise ValueError("a log-prob that is above 0, infinite or NaN")
    return values if found.max(initial=0.0) <= 0 else [min(value, 0.0) for value in values]


def _meaning(token_ids: list[int], finish: Any, most: int, stops: frozenset[int]) -> FinishReason:
    """What becomes of the response; the table at the top."""
    reason, length = finish["type"], len(token_ids)
    matched = finish.get("matched", token_ids[-1] if token_ids else None)
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    if length > most:
        raise ValueError(f"{length} tokens where {most} were asked for")
    if stops and not stops.isdisjoint(token_ids[:-1]):
        raise ValueError("tokens after a stop id")
    if reason == "stop" and isinstance(matched, str):  # SGLang says "NaN happened" so, behind a stop id that it made up
        raise ValueError(f"stopped at {matched!r}, and no text was asked to stop at")
    if token_ids and token_ids[-1] in stops:
        return "stop"
    if length == most:
        return "length"
    if reason == "stop" and matched in stops:
        raise ValueError(f"the stop id {matched} was cut off the response")
    if reason == "stop":
        raise ValueError(
            f"stopped at id {matched}, which is not among the run's stop ids {sorted(stops)}: name it in "
            "--rollout-stop-token-ids"
        )
    if reason == "length":
        raise ValueError(
            f"ended after {length} of {most} tokens: the server's context (--sglang-context-length) is shorter"
        )
    return "abort"


def _spans(meta: dict[str, Any], length: int) -> tuple[tuple[int, int, int], ...]:
    """The versions of the weights by token; a server that was never published to calls its own "default": version -1."""
    parts = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    spans = tuple((_version(part["version"]), count_of(part["start"]), count_of(part["end"])) for part in parts)
    ends = [0, *(end for _, _, end in spans)]
    if (
        any(begin != before or end < begin for before, (_, begin, end) in zip(ends, spans, strict=False))
        or ends[-1] != length
    ):
        raise ValueError(f"weight versions of tokens {[span[1:] for span in spans]} do not cover {length}")
    return tuple(span for span in spans if span[2] > span[1])


def _version(name: Any) -> int:
    return int(name) if re.fullmatch(r"[0-9]{1,18}", str(name)) else -1


def count_of(number: Any) -> int:
    """A whole number that is not negative, out of JSON.

    Raises:
        TypeError: it is none.
    """
    if type(number) is not int or number < 0:
        raise TypeError(f"{number!r} is no count")
    return int(number)
