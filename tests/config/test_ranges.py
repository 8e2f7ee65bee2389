"""Every numeric option has a range, which the command line and Python both hold."""

from __future__ import annotations

import argparse
import math
import typing
from dataclasses import fields
from typing import Any

import pytest

from megatron_dapo.config import OPTION_PARTS, Options
from megatron_dapo.config.ranges import (
    LARGEST,
    MAY_BE_NEGATIVE,
    MEGATRON,
    RANGES,
    Range,
    check_megatron_ranges,
)
from megatron_dapo.types import InputError


def number_of(annotation: Any) -> type | None:
    """int or float where that is what an option holds, alone, in a list, or beside None."""
    kinds = {annotation, *typing.get_args(annotation)}
    kinds |= {inner for kind in kinds for inner in typing.get_args(kind)}
    return int if int in kinds else float if float in kinds else None


NUMERIC = {
    f.name: (number_of(f.type), "list" in str(f.type))
    for part in OPTION_PARTS
    for f in fields(part)
    if number_of(f.type)
}


def edges(kind: type, allowed: Range) -> tuple[list[Any], list[Any]]:
    """Values just inside a range, and values just outside it."""
    inside: list[Any] = [kind(value) for value in allowed.special]
    outside: list[Any] = [math.nan, math.inf, -math.inf, -1e300]
    for end, excluded, outwards in ((allowed.low, allowed.above, -1), (allowed.high, allowed.below, 1)):
        if math.isinf(end):
            continue
        beyond = int(end) + outwards if kind is int else math.nextafter(end, outwards * math.inf)
        within = int(end) if kind is int else math.nextafter(end, -outwards * math.inf)
        inside.append(within if excluded else kind(end))
        outside += [kind(end)] if excluded else []
        outside += [] if beyond in allowed.special else [beyond]
    return inside, [int(v) if kind is int and math.isfinite(v) else v for v in outside]


def test_every_numeric_option_has_a_range_and_no_range_lacks_its_option():
    assert NUMERIC.keys() == RANGES.keys()
    assert len(NUMERIC) > 50 and {name for name, (_, several) in NUMERIC.items() if several}
    assert all(RANGES[name].whole == (kind is int) for name, (kind, _) in NUMERIC.items())


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """DAPO's flags as the trainer's parser has them."""
    from megatron_dapo.training.arguments import NEGATIVE_NUMBER, _Flags, _Help

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, formatter_class=_Help)
    parser._negative_number_matcher = NEGATIVE_NUMBER
    for part in OPTION_PARTS:
        _Flags(part).build_group(parser)
    return parser


@pytest.mark.parametrize("name", sorted(RANGES))
def test_what_is_inside_is_taken_and_what_is_outside_is_refused(name, parser):
    kind, several = NUMERIC[name]
    assert kind is not None
    flag, (inside, outside) = "--" + name.replace("_", "-"), edges(kind, RANGES[name])
    assert inside and outside
    for value in inside:
        words = [flag, repr(value), repr(value)] if several else [flag, repr(value)]
        Options.from_args(parser.parse_args(words))
        Options.from_args(**{name: [value] if several else value})
    for value in outside:
        with pytest.raises((InputError, argparse.ArgumentError)) as caught:  # the latter: nan is no int
            Options.from_args(parser.parse_args([flag, repr(value)]))
        assert flag in str(caught.value)
        with pytest.raises(InputError) as refused:
            Options.from_args(**{name: [value] if several else value})
        message = str(refused.value)
        assert message.startswith(f"{flag} {value}: out of range; give") and "\n" not in message


@pytest.mark.parametrize("value", [True, "3", 2.5, [1], None])
def test_what_is_no_whole_number_is_refused_from_python(value):
    if value is None:
        assert Options.from_args(max_tokens_per_gpu=None).update.max_tokens_per_gpu is None
        return
    options = {"num_rollout": value} if value != [1] else {"num_rollout": [0]}
    with pytest.raises(InputError, match="--num-rollout"):
        Options.from_args(**options)


def test_the_help_says_the_range(parser):
    text = " ".join(parser.format_help().split())
    assert "Lower clip range. (default: 0.2) Range: a number above 0 and below 1." in text
    assert text.count(" Range: ") == len(RANGES)


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (Range(0, 1, above=True), "a number above 0 and at most 1"),
        (Range(1, LARGEST, special=(-1,), whole=True), "-1, or a whole number at least 1"),
        (Range(0, math.inf, below=True), "a number at least 0"),
    ],
)
def test_a_range_is_said_in_words(allowed, text):
    assert str(allowed) == text


@pytest.mark.parametrize("name", sorted(MEGATRON))
def test_megatrons_numbers_have_their_ranges_too(name):
    whole = MEGATRON[name].whole
    inside, outside = edges(int if whole else float, MEGATRON[name])
    for value in inside:
        check_megatron_ranges({name: value})
    for value in outside:
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
            check_megatron_ranges({name: value})


def test_any_other_number_of_megatrons_is_finite_and_not_negative():
    for value in (-1, -1.0, math.nan, math.inf, [3, -2]):
        with pytest.raises(InputError, match="--eval-interval"):
            check_megatron_ranges({"eval_interval": value})
    check_megatron_ranges({"eval_interval": 0, "save_interval": None, "bf16": True, "load": "-1", "timeout": 3.5})
    for name in MAY_BE_NEGATIVE:
        check_megatron_ranges({name: -1})
        with pytest.raises(InputError):
            check_megatron_ranges({name: math.nan})
