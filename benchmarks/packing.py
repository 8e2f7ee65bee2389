"""Packing a rollout of DAPO's shape: how full micro-batches are, and how even the ranks, beside two other ways.

Lengths are lognormal, mean about 4k, tail to 20k (8,192 of them); micro-batches hold 22,528 tokens; 8 data-parallel ranks.
``sequential`` fills micro-batches in order and deals them round; ``karmarkar-karp`` splits the samples over ranks by largest
differencing first, as other systems do, and fills each rank's micro-batches afterwards (first fit, longest first).

    python benchmarks/packing.py [--samples 8192] [--span 30000]
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable

import numpy as np

from megatron_dapo.data.packing import pack_sequences

RANKS, BUDGET, MULTIPLE = 8, 22528, 16
Plan = list[list[list[int]]]


def ours(lengths: np.ndarray, span: float) -> Plan:
    """The package's."""
    plan = pack_sequences(lengths, RANKS, BUDGET, MULTIPLE, attention_span=span)
    return [[batch.tolist() for batch in rank] for rank in plan]


def fill(samples: list[int], lengths: np.ndarray, longest_first: bool) -> list[list[int]]:
    """Micro-batches of samples in order (open: the last), or first fit, longest first (open: all)."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(samples, key=lambda i: -lengths[i]) if longest_first else samples:
        candidates = range(len(bins)) if longest_first else range(max(0, len(bins) - 1), len(bins))
        at = next((b for b in candidates if rooms[b] >= lengths[i]), None)
        if at is None:
            bins.append([])
            rooms.append(BUDGET)
            at = len(bins) - 1
        bins[at].append(i)
        rooms[at] -= int(lengths[i])
    return bins


def sequential(lengths: np.ndarray, span: float) -> Plan:
    """In order, micro-batches dealt round."""
    bins = fill(list(range(len(lengths))), lengths, longest_first=False)
    return even_out([bins[rank::RANKS] for rank in range(RANKS)])


def karmarkar_karp(lengths: np.ndarray, span: float) -> Plan:
    """Largest differencing over ranks by cost, then first fit on each."""
    cost = lengths * (1 + lengths / span)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i in range(len(lengths)):
        parts = [(0.0, [])] * (RANKS - 1) + [(float(cost[i]), [i])]
        heapq.heappush(heap, (-float(cost[i]), i, parts))
    number = len(lengths)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = sorted(
            ((x + y, s + t) for (x, s), (y, t) in zip(a, reversed(b), strict=True)), key=lambda part: part[0]
        )
        number += 1
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
    return even_out([fill(samples, lengths, longest_first=True) for _, samples in heap[0][2]])


def even_out(plan: Plan) -> Plan:
    """Every rank has as many micro-batches as the one with most: the others run empty ones."""
    most = max(map(len, plan))
    return [rank + [[]] * (most - len(rank)) for rank in plan]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument(
        "--span", type=float, default=30_000, help="length at which attention costs as much as all else"
    )
    given = parser.parse_args()
    raw = np.random.default_rng(0).lognormal(np.log(3000), 0.75, given.samples)
    lengths = -(-np.clip(raw, 64, 20480).astype(np.int64) // MULTIPLE) * MULTIPLE
    cost = lengths * (1 + lengths / given.span)
    ways: dict[str, Callable[[np.ndarray, float], Plan]] = {
        "ours": ours,
        "sequential": sequential,
        "karmarkar-karp": karmarkar_karp,
    }
    print(
        f"{given.samples} samples, mean {lengths.mean():.0f}, longest {lengths.max()}, {BUDGET} tokens per micro-batch"
    )
    print(f"{'':16}micro-batches  efficiency  cost imbalance  seconds")
    for name, way in ways.items():
        start = time.perf_counter()
        plan = way(lengths, given.span)
        seconds = time.perf_counter() - start
        assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(given.samples))
        loads = np.array([sum(float(cost[batch].sum()) for batch in rank) for rank in plan])
        efficiency = lengths.sum() / (BUDGET * sum(map(len, plan)))
        print(
            f"{name:16}{sum(map(len, plan)):13d}  {efficiency:10.1%}  {loads.max() / loads.mean() - 1:14.2%}  {seconds:7.2f}"
        )


if __name__ == "__main__":
    main()
