"""Diversity, repetition and overlap, by counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.text_metrics import (
    MAX_SAMPLES,
    MAX_TOKENS,
    contamination,
    distinct_n,
    repetition_rate,
    self_bleu,
    text_sums,
)
from megatron_dapo.tracking import average, unknown_metrics
from megatron_dapo.types import Sample


def words(text: str) -> list[str]:
    return text.split()


def sample(ids) -> Sample:
    ids = np.asarray(ids, dtype=np.int64)
    return Sample(ids, np.zeros(len(ids)), "stop", 0, "")


def test_distinct_by_counting():
    assert distinct_n([words("a b a b"), words("a b c")], 2) == 3 / 5  # ab ba bc of ab ba ab ab bc
    assert distinct_n([[1, 1, 1, 1]], 1) == 0.25
    assert distinct_n([[1, 2], [3]], 3) == 0.0 and distinct_n([], 2) == 0.0


def test_repetition_by_counting():
    assert repetition_rate(words("a b a b a b"), 2) == pytest.approx(3 / 5)
    assert repetition_rate([1, 2, 3, 4, 5], 4) == 0.0
    assert repetition_rate([7] * 1004, 4) == pytest.approx(1000 / 1001)
    assert repetition_rate([1, 2, 3], 4) == 0.0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_is_the_other_side_of_distinct(tokens, n):
    seen = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    repeated = sum(gram in seen[:i] for i, gram in enumerate(seen))
    assert repetition_rate(tokens, n) == pytest.approx(repeated / len(seen) if seen else 0.0)
    if seen:
        assert distinct_n([tokens], n) == pytest.approx(1 - repetition_rate(tokens, n))


def test_self_bleu_from_all_the_same_to_nothing_shared():
    assert self_bleu([[1, 2, 3, 4, 5]] * 3) == pytest.approx(1.0)
    assert self_bleu([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]) < 0.05
    assert self_bleu([[1], [1]]) == pytest.approx(1.0)


def test_self_bleu_by_hand():
    # each shares 3 of 4 words and 2 of 3 bigrams with the other, same length: sqrt(3/4 * 2/3)
    assert self_bleu([words("a b c d"), words("a b c e")], max_n=2) == pytest.approx(0.5**0.5)


def test_contamination_by_counting():
    problem = words("let x be the sum of all odd numbers")
    near = words("now let x be the sum of two primes")  # five 5-grams: "let .. sum" and "x .. of" are shared
    others = [words("the sum"), words("a b c d e f")]
    assert contamination([problem, near, *others], [others[1][:3], problem], n=5) == [1.0, 2 / 5, 0.0, 0.0]
    assert contamination([list(range(20))], [list(range(5, 18))]) == [1 / 8]  # n = 13: one window of eight


def test_text_sums_over_responses():
    sums = text_sums([sample([1, 2, 1, 2, 1, 2]), sample([3, 4, 5, 6]), sample([9])])
    assert sums["text/distinct_2"] == (5.0, 8.0)  # 12 21 34 45 56
    assert sums["text/repetition_4"] == (pytest.approx(1 / 3), 2.0)
    assert unknown_metrics(average(sums)) == []


def test_text_sums_without_anything_to_say():
    assert text_sums([]) == {} and text_sums([sample([]), sample([4])]) == {}


def test_text_sums_looks_at_a_bounded_part_of_a_large_step():
    long = np.arange(3 * MAX_TOKENS)
    long[-MAX_TOKENS:] = 5  # it ends in a loop
    sums = text_sums([sample(long)] * 8192)
    assert sums["text/distinct_2"] == (1.0, MAX_SAMPLES * (MAX_TOKENS - 1.0))
    assert sums["text/repetition_4"][1] == MAX_SAMPLES
    assert average(sums)["text/repetition_4"] > 0.999


def test_text_sums_spreads_over_the_whole_step():
    step = [sample([i, i + 1]) for i in range(0, 10 * MAX_SAMPLES, 2)]
    first_and_last = [step[0], *[sample([0, 1])] * (len(step) - 2), step[-1]]
    assert text_sums(first_and_last)["text/distinct_2"] == (2.0, MAX_SAMPLES)
