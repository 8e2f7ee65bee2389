"""How far two computations of one number may lie apart: from what is computed, never from what some machine has shown.

The order in which a sum's terms are added depends on the processor's vector width, the number of threads, the batch and the
parallel layout. A log-prob comes out of a chain of such sums: ``LINKS_PER_LAYER`` of them in every layer, and a few at the
ends. One link computed in two orders differs by about one unit in the last place of its result (the roundings of a sum are
a random walk, and most of them are of partial sums that are smaller than the result). What an earlier link was off by is
passed on at its relative size, for norms and residuals keep the size of what passes. So two results lie apart by no more
than one unit in the last place, at the size of the logits, for every link. A wrong weight, mask, scale or position moves
log-probs by ``CONTROL`` times as much, which a test shows beside its comparison wherever it can.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

LINKS_PER_LAYER = 13
"""Norm, query/key/value, rotation, scores, softmax, weighted sum, output projection, residual; norm, gate and up, activation,
down, residual."""

LINKS_AT_THE_ENDS = 3
"""Norm, output layer, log of the sum of exponentials."""

CONTROL = 1000.0
"""A control's difference is at least so many times the bound."""

FP32, BF16 = 2.0**-23, 2.0**-7
"""Distance from 1 to the next number."""


def links(layers: int) -> int:
    """Sums between a token's id and its log-prob."""
    return LINKS_PER_LAYER * layers + LINKS_AT_THE_ENDS


def ulp(magnitude: float) -> float:
    """One unit in the last place of an fp32 number of this size."""
    return float(np.spacing(np.float32(abs(magnitude))))


def logprob_bound(layers: int, logprobs: Iterable[float]) -> float:
    """Largest difference of fp32 log-probs of one model; ``logprobs`` tell the size of its logits."""
    return links(layers) * ulp(max(map(abs, logprobs)))


def relative_bound(layers: int, passes: int = 1) -> float:
    """Largest relative difference of what follows from fp32 log-probs of the size 1: the mean of a loss, and with ``passes`` 3
    a gradient (the way back has two products for each of the way there), relative to its largest entry."""
    return passes * links(layers) * FP32


def mean_bound(layers: int, count: int, eps: float) -> float:
    """Largest relative error, at three standard deviations, of a mean over ``count`` tokens that were rounded independently of
    each other: where ``links`` units in the last place of every token would be no bound at all, in bf16."""
    return float(3 * eps / 2 * np.sqrt(links(layers) / count))


def largest(a: Iterable[float], b: Iterable[float]) -> float:
    """Largest difference between numbers at the same place."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def assert_same_logprobs(layers: int, got: Iterable[float], want: Iterable[float]) -> None:
    """Two fp32 computations of the same log-probs."""
    got, want = list(map(float, got)), list(map(float, want))
    off, bound = largest(got, want), logprob_bound(layers, want)
    assert off <= bound, f"log-probs differ by {off:.3g}, rounding explains {bound:.3g}"
