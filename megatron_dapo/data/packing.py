"""From ragged samples to optimizer steps and balanced micro-batches. Pure numpy; every rank computes the same plan."""

from __future__ import annotations

import heapq
import math

import numpy as np

from megatron_dapo.types import FloatArray, InputError, IntArray


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def split_minibatches(group_N: IntArray, num_steps: int, seed: int) -> list[IntArray]:
    """The samples of each of ``num_steps`` optimizer steps: whole groups in seeded order, sizes within one group.

    ``group_N`` labels the sample's group; rows of one label stay together and in order. Nothing is left out.
    """
    labels, first = np.unique(group_N, return_index=True)
    ordered = labels[np.argsort(first)]
    shuffled = np.random.default_rng(seed).permutation(ordered)
    rows = {label: np.flatnonzero(group_N == label) for label in ordered}
    steps = np.array_split(shuffled, min(num_steps, len(shuffled)))
    return [np.concatenate([rows[label] for label in step]) for step in steps]


def pack_sequences(
    lengths_N: IntArray,
    dp_size: int,
    token_budget: int,
    multiple: int = 1,
    num_micro_multiple: int = 1,
    attention_span: float = math.inf,
) -> list[list[IntArray]]:
    """Pack samples into micro-batches: for each data-parallel rank a list of index arrays, as many on every rank.

    First the fewest bins of at most ``token_budget`` padded tokens (best fit, longest first), rounded up to a multiple of
    ``dp_size`` x ``num_micro_multiple``; then the samples are dealt over that many bins, longest first, each to the
    lightest bin with room, and the bins over the ranks likewise, by cost: a sequence of L tokens costs
    L (1 + L / ``attention_span``), for attention grows with the length (span: where it costs as much as all else). With
    fewer samples than bins some are empty: the trainer runs those with a dummy token, for every rank must join every
    collective.

    Raises:
        InputError: a sample is longer than the budget.
    """
    padded = np.array([padded_length(int(n), multiple) for n in lengths_N], dtype=np.int64)
    if len(padded) and int(padded.max()) > token_budget:
        raise InputError(
            f"a sequence of {int(padded.max())} tokens does not fit a micro-batch of {token_budget}; raise --max-tokens-per-gpu"
        )
    unit = dp_size * num_micro_multiple
    longest_first = np.argsort(-padded, kind="stable")
    count = padded_length(max(1, _bins_needed(padded[longest_first], token_budget)), unit)
    while (bins := _deal(padded, longest_first, count, token_budget)) is None:
        count += unit
    return _over_ranks(bins, padded * (1 + padded / attention_span), dp_size)


def _bins_needed(padded: IntArray, budget: int) -> int:
    """Bins that best-fit uses for lengths in descending order (rooms kept sorted, so a search a sample)."""
    import bisect

    rooms: list[int] = []
    for length in map(int, padded):
        at = bisect.bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else budget
        bisect.insort(rooms, room - length)
    return len(rooms)


def _deal(padded: IntArray, order: IntArray, count: int, budget: int) -> list[list[int]] | None:
    """Deal samples over ``count`` bins, each to the lightest with room; None where one finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in map(int, order):
        load, number = heap[0]
        if load + int(padded[index]) > budget:  # the lightest has no room, so none has
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (load + int(padded[index]), number))
    return bins


def _over_ranks(bins: list[list[int]], cost: FloatArray, dp_size: int) -> list[list[IntArray]]:
    """Give every rank the same number of bins and about the same cost: dearest first, each to the rank with the least."""
    loads = [float(cost[b].sum()) if b else 0.0 for b in bins]
    ranks: list[list[IntArray]] = [[] for _ in range(dp_size)]
    totals = [0.0] * dp_size
    room = len(bins) // dp_size
    for number in sorted(range(len(bins)), key=lambda b: (-loads[b], b)):
        rank = min((r for r in range(dp_size) if len(ranks[r]) < room), key=lambda r: (totals[r], r))
        ranks[rank].append(np.array(sorted(bins[number]), dtype=np.int64))
        totals[rank] += loads[number]
    return ranks
