"""Ratios measured in one run: two things in turn, A B A B ..., so that a machine whose speed drifts does not decide."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    title: str, a: Callable[[], object], b: Callable[[], object], pairs: int = 7, warmup: int = 1
) -> list[float]:
    """Time ``a`` and ``b`` in turn; print and return the ratios time(b) / time(a), pair by pair (above 1: a is faster)."""
    for _ in range(warmup):
        a(), b()
    times = [(seconds(a), seconds(b)) for _ in range(pairs)]
    ratios = [tb / ta for ta, tb in times]
    print(
        f"{title}: {spread(ratios)}   (a {spread([t for t, _ in times])} s, b {spread([t for _, t in times])} s)",
        flush=True,
    )
    return ratios


def spread(values: list[float]) -> str:
    """Median, then smallest and largest."""
    return f"{statistics.median(values):.3g} [{min(values):.3g} .. {max(values):.3g}]"
