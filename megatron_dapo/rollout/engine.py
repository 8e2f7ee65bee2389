"""What the sampler and the evaluation ask of whoever generates, and the seeds they hand out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from megatron_dapo.types import Request, Sample, SamplingParams, Sums


class Engine(Protocol):
    """Generates responses with the weights last published.

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
        """One sample a request, in the order of ``requests`` and not in the order they ended.

        A response that the engine lost comes back as a sample with finish reason ``abort``, never as a gap.
        ``on_finish`` hears the number of responses finished so far.
        """
        ...

    def publish(self, version: int) -> None:
        """The trainer's weights are now ``version``: use them, and drop what was cached under older ones."""
        ...

    def report(self) -> Sums:
        """What happened on the way since the last call: retries, losses, cached tokens."""
        ...

    def close(self) -> None:
        """Stop what was started. The engine is not used again."""
        ...


def request_seed(seed: int, order: int, index: int) -> int:
    """Seed of sample ``index`` of group ``order`` in a run of ``seed``, in 0 .. 2**63 - 1.

    It depends on nothing else, so neither batching nor the number of ranks changes a sample, and a resumed
    run draws what the uninterrupted one would have drawn. All three are non-negative.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(order, index))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
