"""What a request to SGLang says and what makes an answer one: pure, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.types import FinishReason, Request, SamplingParams


@dataclass(frozen=True)
class Reply:
    """A checked answer: ids, a log-prob each, why it ended, and (version, begin, end) of the weights behind the tokens."""

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
    return {
        "input_ids": [*request.prompt.token_ids, *so_far],
        "sampling_params": {
            "max_new_tokens": params.max_tokens - len(so_far),
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
            "sampling_seed": request.seed,  # heeded by servers with --enable-deterministic-inference
        },
        "return_logprob": True,
        "stream": False,
    }


def parse_reply(answer: Any, most: int) -> Reply:
    """Check an answer of ``/generate`` that may hold at most ``most`` tokens.

    Raises:
        ValueError, KeyError, TypeError: it is not one; ids and log-probs disagree; a log-prob is not one.
    """
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    finish = meta["finish_reason"] or {"type": "abort", "message": "no reason given"}
    entries = meta.get("output_token_logprobs") or []
    reason = finish["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    if [entry[1] for entry in entries] != token_ids:
        raise ValueError(f"{len(token_ids)} ids and log-probs of {len(entries)} others")
    if not token_ids and reason != "abort" or len(token_ids) > most:
        raise ValueError(f"{len(token_ids)} tokens of at most {most}, finish reason {reason}")
    logprobs = [float(entry[0]) for entry in entries]
    if any(not math.isfinite(x) or x > 1e-3 for x in logprobs):
        raise ValueError("a log-prob that is above 0, infinite or NaN")
    return Reply(
        token_ids=[int(token) for token in token_ids],
        logprobs=logprobs,
        finish_reason=reason,
        spans=_spans(meta, len(token_ids)),
        message=str(finish.get("message", "")),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
    )


def _spans(meta: dict[str, Any], length: int) -> tuple[tuple[int, int, int], ...]:
    """The versions of the weights by token; a server that was never published to calls its own "default": version -1."""
    parts = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    spans = tuple((_version(part["version"]), int(part["start"]), int(part["end"])) for part in parts)
    return tuple(span for span in spans if span[2] > span[1])


def _version(name: Any) -> int:
    return int(name) if str(name).isdigit() else -1
