"""The predicate of dynamic sampling (paper section 3.2): does a group of responses carry a signal?"""

from __future__ import annotations

from typing import Literal

from megatron_dapo.types import Group, Sample

ACC_TOLERANCE = 1e-6
"""Accuracies closer than this are equal."""

Verdict = Literal["mixed", "all_right", "all_wrong", "level", "unscored"]


def has_verdict(sample: Sample) -> bool:
    """False where the verifier died or the response was lost on the way: neither is a wrong answer."""
    return sample.status in ("ok", "no_answer") and sample.finish_reason != "abort"


def verdict_of(group: Group) -> Verdict:
    """What the samples with a verdict say of their group: only ``mixed``, max - min > 1e-6, has a signal.

    ``level`` is equal partial credit: no more of a signal than all right is. Never a standard deviation: that
    of sixteen equal floats need not be 0.
    """
    acc = [s.acc for s in group.samples if has_verdict(s)]
    if not acc:
        return "unscored"
    if max(acc) - min(acc) > ACC_TOLERANCE:
        return "mixed"
    if min(acc) >= 1.0 - ACC_TOLERANCE:
        return "all_right"
    return "all_wrong" if max(acc) <= ACC_TOLERANCE else "level"
