"""The nouns of the system: what flows from a row of data to an optimizer step, and who fills which field.

``Prompt`` (data) -> ``Sample`` (engine, then rewards) -> ``Group`` (sampler) -> ``Trajectories`` (columns for the trainer).
Shape suffixes used everywhere: ``_G`` samples of one prompt, ``_N`` samples of a rollout step (prompts x G).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Sums = dict[str, tuple[float, float]]
"""Metrics on their way up: name -> (sum, count), added across waves, micro-batches and ranks, divided once at the top.
A name that ends in ``/max`` is (largest value, 1) and is merged by max."""

FinishReason = Literal["stop", "length", "abort"]
RewardStatus = Literal["ok", "no_answer", "timeout", "error"]


class InputError(ValueError):
    """Something the user gave is wrong and the user can fix it.

    The message is one line that names the value and the fix; ``__main__`` prints it and exits with code 2.
    """


def merge_sums(*parts: Sums) -> Sums:
    """Add metrics of several waves, micro-batches or ranks; ``/max`` names keep the largest."""
    merged: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            before, seen = merged.get(name, (total, 0.0))
            if name.endswith("/max"):
                merged[name] = (max(before, total), 1.0)
            else:
                merged[name] = (before + total if seen else total, seen + count)
    return merged


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be sampled from. Filled by ``data.prompts``.

    ``uid`` names the row (never its text: two rows may read the same), ``token_ids`` is what the policy is given.
    """

    uid: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One response of the policy.

    The engine fills the first block: ``token_ids`` [T] are exactly the sampled ids, the stop id included;
    ``logprobs`` [T] is log-softmax(logits / temperature) before top-k and top-p, under the weights of ``weight_version``.
    Where weights changed under the response, ``spans`` has (version, begin, end) of its parts and ``weight_version`` is the
    oldest of them.
    The reward pool fills the second: ``acc`` (raw correctness in [0, 1], feeds the filter), ``score`` (the task reward,
    feeds the advantage), ``status`` (a verifier that died is not a wrong answer), ``prediction`` (what it took for the
    answer). Shaping changes nothing here: shaped rewards are ``Trajectories.rewards``.
    """

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: FinishReason
    weight_version: int
    text: str
    spans: tuple[tuple[int, int, int], ...] = ()

    score: float = 0.0
    acc: float = 0.0
    prediction: str = ""
    status: RewardStatus = "error"

    @property
    def length(self) -> int:
        """Response tokens, the stop id included."""
        return len(self.token_ids)

    @property
    def truncated(self) -> bool:
        """True where the length limit, not the policy, ended the response."""
        return self.finish_reason == "length"


@dataclass
class Group:
    """All G samples of one prompt of one wave. ``order`` is its serial number within the run."""

    prompt: Prompt
    samples: list[Sample]
    order: int

    @property
    def acc_G(self) -> FloatArray:
        """Raw correctness of every sample, float64 [G]."""
        return np.array([s.acc for s in self.samples], dtype=np.float64)


@dataclass
class Trajectories:
    """A rollout step as columns, one entry per sample (N of them, groups contiguous): what the trainer consumes.

    ``tokens`` [N] of [prompt + response] ids; ``prompt_lengths`` [N]; ``rollout_logprobs`` [N] of [response];
    ``loss_mask`` [N] of [response] bool; ``advantages`` [N] float64, constant over the tokens of a response;
    ``rewards`` [N] shaped, ``acc`` [N] raw; ``group`` [N] index of the group; ``weight_version`` [N].
    """

    tokens: list[IntArray]
    prompt_lengths: IntArray
    rollout_logprobs: list[FloatArray]
    loss_mask: list[BoolArray]
    advantages: FloatArray
    rewards: FloatArray
    acc: FloatArray
    group: IntArray
    weight_version: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response_lengths(self) -> IntArray:
        """Response tokens of every sample, int64 [N]."""
        return np.array([len(t) for t in self.tokens], dtype=np.int64) - self.prompt_lengths

    def take(self, rows: IntArray | list[int]) -> Trajectories:
        """The samples at ``rows``, in that order."""
        picked = np.asarray(rows, dtype=np.int64)
        return Trajectories(
            tokens=[self.tokens[i] for i in picked],
            prompt_lengths=self.prompt_lengths[picked],
            rollout_logprobs=[self.rollout_logprobs[i] for i in picked],
            loss_mask=[self.loss_mask[i] for i in picked],
            advantages=self.advantages[picked],
            rewards=self.rewards[picked],
            acc=self.acc[picked],
            group=self.group[picked],
            weight_version=self.weight_version[picked],
        )


@dataclass(frozen=True)
class SamplingParams:
    """How a response is drawn. ``top_k`` -1 and ``top_p`` 1.0 mean the whole distribution; ``temperature`` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response wanted of an engine. ``seed`` alone decides its randomness, so a batch may be cut in any way."""

    prompt: Prompt
    seed: int
