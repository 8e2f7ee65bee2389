"""What the sampler and the evaluation ask of whoever generates, the table of engines, and the seeds of requests."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_dapo.config import Options
from megatron_dapo.plugins import Registry
from megatron_dapo.types import Request, Sample, SamplingParams, Sums


class Engine(Protocol):
    """Generates responses with the weights last published. Every rank has one.

    Rank 0 asks (``generate``) and ends with ``release``; meanwhile the other ranks are in ``follow`` and take part in
    whatever an answer needs of them.

    Example::

        engine.publish(version=3)
        samples = engine.generate([Request(prompt, request_seed(1234, order, i)) for i in range(16)], params)
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next ``generate`` uses; every sample carries it."""
        ...

    def generate(
        self,
        requests: list[Request],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        """One sample per request, in the order of ``requests`` and not in the order they ended. Rank 0 only.

        A response that the engine lost comes back as a sample with finish reason ``abort``, never as a gap.
        ``on_finish`` is called with the number of responses finished so far.
        """
        ...

    def follow(self) -> None:
        """Every rank but 0: take part in what rank 0 generates until it calls ``release``."""
        ...

    def release(self) -> None:
        """Rank 0: nothing more is generated for now; the other ranks return from ``follow``."""
        ...

    def publish(self, version: int) -> None:
        """The trainer's weights are now ``version``: use them, and drop what was cached under older ones. Collective."""
        ...

    def report(self) -> Sums:
        """Retries, losses and cached tokens since the last call. Rank 0 only."""
        ...

    def close(self) -> None:
        """Stop what was started. The engine is not used again."""
        ...


class Probe(Protocol):
    """What the trainer's weights of this moment say of a fixed sequence."""

    @property
    def tokens(self) -> list[int]:
        """The ids of the sequence."""
        ...

    def logprobs(self) -> list[float]:
        """Log-probs at temperature 1 of every token after the first, on rank 0 (elsewhere an empty list). Collective."""
        ...


@dataclass(frozen=True)
class Policy:
    """The trained model as engines see it: Megatron's list of model chunks, a context in which their weights are complete and
    dropout is off, and the probe."""

    model: list[Any]
    inference: Callable[[], AbstractContextManager[Any]]
    probe: Probe


Decode = Callable[[list[int]], str]
Note = Callable[[str], None]
MakeEngine = Callable[[Namespace, Options, Policy, Decode | None, Note], Engine]
"""Arguments, options, policy, what turns ids into text (None but on rank 0), where messages go -> this rank's engine."""

ENGINES = Registry[MakeEngine](
    "--rollout-engine",
    "engine",
    {"embedded": "megatron_dapo.rollout.embedded:make", "sglang": "megatron_dapo.servers.engine:SglangEngine"},
)
"""By import path, for an engine may know more than this folder does. Your own: ``--rollout-engine package.module:make``."""


def request_seed(seed: int, order: int, index: int) -> int:
    """Seed of sample ``index`` of group ``order`` in a run of ``seed``, in 0 .. 2**63 - 1.

    It depends on nothing else, so neither batching nor the number of ranks changes a sample, and a resumed
    run draws what the uninterrupted one would have drawn. All three are non-negative.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(order, index))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
