"""Rotary positions of a Hugging Face ``config.json``: plain, Llama 3's and YaRN, as transformers reads them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.types import InputError

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron's ``--use-rope-scaling`` has these built in."""

ROPE_KEYS = {
    "default": set[str](),
    "llama3": {"factor", *LLAMA3_ROPE},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
}  # fmt: skip
"""Kinds of rotary positions, and the settings that each knows."""


@dataclass(frozen=True)
class Yarn:
    """YaRN's settings: rotary frequencies below ``beta_slow`` turns in the original context are divided by ``factor``, above
    ``beta_fast`` kept; cos and sin are multiplied by ``attention_factor``. SGLang reads no attention_factor: it has its own."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    server_attention_factor: float

    @property
    def usual_attention_factor(self) -> float:
        """What follows from ``factor`` alone, as in the paper."""
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0


def of_all_layers(rope: Any, place: str) -> Any:
    """Rotary settings given by type of layer, of which only full attention is supported: those of full attention."""
    if not isinstance(rope, dict) or not any(isinstance(value, dict) for value in rope.values()):
        return rope
    if not isinstance(rope.get("full_attention"), dict):
        raise InputError(f"{place}: settings of {', '.join(sorted(rope))}, none of full_attention")
    return rope["full_attention"]


def positive(value: Any, name: str, source: str) -> float:
    """A number of config.json that has to be above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{source}: {name} is {value!r}, not a number above 0")
    return float(value)


def rope_of(resolved: Any, source: str) -> tuple[float, float | None, Yarn | None]:
    """Rotary base; Llama 3's factor; YaRN's settings."""
    given = {name: value for name, value in resolved.rope_parameters.items() if value is not None}
    theta = positive(given.pop("rope_theta", None), "rope_theta", source)
    kind = given.pop("rope_type", "default")
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{source}: partial_rotary_factor other than 1 is not supported")
    if kind not in ROPE_KEYS:
        raise InputError(f"{source}: rotary scaling {kind} is not supported; {', '.join(ROPE_KEYS)} are")
    if unknown := given.keys() - ROPE_KEYS[kind]:
        raise InputError(f"{source}: rotary scaling {kind} has no {', '.join(sorted(unknown))}; remove it")
    if kind == "yarn":
        given.setdefault("truncate", resolved.rope_parameters.get("truncate", True))
        return theta, None, _yarn(given, resolved.max_position_embeddings, source)
    if kind == "default":
        return theta, None, None
    odd = {name: given.get(name) for name, value in LLAMA3_ROPE.items() if given.get(name) != value}
    if odd:
        raise InputError(f"{source}: rotary scaling llama3 with {odd} is not supported; only with {LLAMA3_ROPE}")
    return theta, positive(given["factor"], "factor of the rotary scaling", source), None


def _yarn(given: dict[str, Any], max_positions: int, source: str) -> Yarn:
    def number(name: str, default: float) -> float:
        return positive(given.get(name) or default, f"{name} of the rotary scaling", source)

    original = given["original_max_position_embeddings"]
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise InputError(f"{source}: original_max_position_embeddings is {original!r}, not an integer above 0")
    truncate = given["truncate"]
    if not isinstance(truncate, bool):
        raise InputError(f"{source}: truncate of the rotary scaling is {truncate!r}, not true or false")
    factor = number("factor", max_positions / original)
    plain = Yarn(factor, original, number("beta_fast", 32.0), number("beta_slow", 1.0), truncate, 1.0, 1.0)

    def of_scale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention = plain.usual_attention_factor
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention = of_scale(number("mscale", 1.0)) / of_scale(number("mscale_all_dim", 1.0))
    servers = attention
    if "attention_factor" in given:
        attention = positive(given["attention_factor"], "attention_factor of the rotary scaling", source)
    if factor <= 1 and attention != 1.0:
        raise InputError(f"{source}: YaRN with factor {factor:g} and attention factor {attention:g} is not supported")
    return replace(plain, attention_factor=attention, server_attention_factor=servers)


def yarn_arguments(yarn: Yarn) -> dict[str, Any]:
    """Megatron derives the attention factor as 0.1 x mscale x log(factor) + 1."""
    mscale = 1.0
    if yarn.attention_factor != yarn.usual_attention_factor:
        mscale = (yarn.attention_factor - 1.0) / (0.1 * math.log(yarn.factor))
    rounds = "yarn_correction_range_round_to_int"
    return {
        "rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_positions,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        rounds if yarn.truncate else f"no_{rounds}": True,
        "mscale": mscale,
        "mscale_all_dim": 0.0,
    }
