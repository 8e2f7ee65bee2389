"""What responses look like, without a judge: diversity, repetition, overlap with evaluation problems.

Everything works on sequences of anything hashable, token ids or words, and needs no corpora. BLEU is NLTK's, which nothing
else here needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from megatron_dapo.types import Sample, Sums

Tokens = Sequence[Hashable]

MAX_SAMPLES = 128
"""``text_sums`` looks at this many samples of a step, evenly spaced over it."""
MAX_TOKENS = 2048
"""``text_sums`` looks at this many last tokens of a response: loops begin late and never end."""


def _ngrams(tokens: Tokens, n: int) -> Iterator[tuple[Hashable, ...]]:
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def distinct_n(sequences: Sequence[Tokens], n: int) -> float:
    """Distinct n-grams over all n-grams of ``sequences`` together, in (0, 1]; 0.0 where there is no n-gram.

    Falls as sequences get longer, so compare like with like. Source: Li et al., arXiv 1510.03055.
    """
    distinct, total = _distinct(sequences, n)
    return distinct / total if total else 0.0


def _distinct(sequences: Sequence[Tokens], n: int) -> tuple[int, int]:
    seen: set[tuple[Hashable, ...]] = set()
    total = 0
    for tokens in sequences:
        seen.update(_ngrams(tokens, n))
        total += max(0, len(tokens) - n + 1)
    return len(seen), total


def repetition_rate(tokens: Tokens, n: int) -> float:
    """Share of a response's n-grams that occurred in it before, in [0, 1): 0 is none, a loop tends to 1.

    Example: ``repetition_rate("a b a b a b".split(), 2)`` is 3 of 5 = 0.6.
    """
    total = len(tokens) - n + 1
    return 1.0 - len(set(_ngrams(tokens, n))) / total if total > 0 else 0.0


def self_bleu(sequences: Sequence[Tokens], max_n: int = 4) -> float:
    """Mean BLEU of each sequence against all the others, in [0, 1]: 1 is all the same.

    For tens of sequences, not thousands: the cost grows with their square. A sequence shorter than ``max_n``
    is judged by the n-grams that it has. At least two, none empty. Source: Zhu et al., arXiv 1802.01886.
    """
    assert len(sequences) > 1 and all(len(s) for s in sequences), "two or more sequences, none empty"
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    smooth = SmoothingFunction().method1
    scores = []
    for i, hypothesis in enumerate(sequences):
        others = [other for j, other in enumerate(sequences) if j != i]
        orders = min(max_n, len(hypothesis))
        weights = (1.0 / orders,) * orders
        scores.append(float(sentence_bleu(others, hypothesis, weights=weights, smoothing_function=smooth)))
    return sum(scores) / len(scores)


def contamination(texts: Sequence[Tokens], problems: Sequence[Tokens], n: int = 13) -> list[float]:
    """For each of ``texts``, the share of its n-grams that stand in one of ``problems`` too, in [0, 1].

    ``texts`` are training prompts or responses, ``problems`` those of an evaluation; both cut alike, into
    words or token ids. A text shorter than n shares nothing. n = 13: Brown et al., arXiv 2005.14165, app. C.
    """
    known = {gram for problem in problems for gram in _ngrams(problem, n)}
    shares = []
    for text in texts:
        total = len(text) - n + 1
        shares.append(sum(gram in known for gram in _ngrams(text, n)) / total if total > 0 else 0.0)
    return shares


def text_sums(samples: Sequence[Sample]) -> Sums:
    """``text/distinct_2`` over the responses together and ``text/repetition_4``, mean of a response.

    Bounded whatever the step's size: the last ``MAX_TOKENS`` tokens of ``MAX_SAMPLES`` evenly spaced samples,
    well below a second. Without samples long enough there is nothing to report.
    """
    rows = np.unique(np.linspace(0, len(samples) - 1, min(len(samples), MAX_SAMPLES)).round().astype(int))
    responses: list[list[int]] = [samples[row].token_ids[-MAX_TOKENS:].tolist() for row in rows]
    sums: Sums = {}
    distinct, total = _distinct(responses, 2)
    if total:
        sums["text/distinct_2"] = (float(distinct), float(total))
    rates = [repetition_rate(r, 4) for r in responses if len(r) >= 4]
    if rates:
        sums["text/repetition_4"] = (sum(rates), float(len(rates)))
    return sums
