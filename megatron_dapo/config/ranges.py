"""The range of every number a run is given: DAPO's options (``RANGES``), and Megatron's flags (``MEGATRON``).

NaN and infinity are in no range. A numeric option without a row here fails a test.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_dapo.types import InputError

LARGEST = 2**31 - 1
"""No count is larger; where it ends a range, nobody needs to read of it."""

YEAR = 366 * 86400.0
"""The longest wait, in seconds: timers of the operating system end not far beyond."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, the ends included unless ``above`` or ``below``; and the ``special`` ones."""

    low: float
    high: float
    above: bool = False
    below: bool = False
    special: tuple[float, ...] = ()
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value  # never a float of it: an int may be too large for one
        if number in self.special:
            return True
        low = self.low < number if self.above else self.low <= number
        return bool(low and (number < self.high if self.below else number <= self.high))  # both are False of NaN

    def __str__(self) -> str:
        """What ``--help`` and a refusal say, e.g. ``a number above 0 and at most 1``."""
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        high = f"{'below' if self.below else 'at most'} {self.high:g}"
        between = low if self.high in (LARGEST, math.inf, YEAR) else f"{low} and {high}"
        special = "".join(f"{value:g}, or " for value in self.special)
        return f"{special}a {'whole ' if self.whole else ''}number {between}"


def _at_least(low: float, high: float = LARGEST) -> Range:
    return Range(low, high, whole=True)


COUNT = _at_least(1)
NATURAL = _at_least(0)
SECONDS = Range(0, YEAR, above=True)
NOT_NEGATIVE = Range(0, math.inf, below=True)
POSITIVE = Range(0, math.inf, above=True, below=True)
SHARE = Range(0, 1)
LESS_THAN_ONE = Range(0, 1, below=True)
TEMPERATURE = Range(0.01, 100)
TOP_K = Range(1, LARGEST, special=(-1,), whole=True)

RANGES: dict[str, Range] = {
    "save_hf_interval": NATURAL,
    "rollout_max_prompt_len": COUNT,
    "num_rollout": COUNT,
    "rollout_batch_size": COUNT,
    "n_samples_per_prompt": COUNT,
    "rollout_max_response_len": COUNT,
    "rollout_temperature": TEMPERATURE,
    "rollout_top_p": Range(0, 1, above=True),
    "rollout_top_k": TOP_K,
    "rollout_stop_token_ids": NATURAL,
    "embedded_batch_size": COUNT,
    "rollout_num_servers": COUNT,
    "rollout_num_gpus_per_engine": COUNT,
    "rollout_server_port": _at_least(0, 65535),
    "server_start_timeout_s": SECONDS,
    "server_health_interval_s": SECONDS,
    "server_health_failures": COUNT,
    "rollout_concurrency": COUNT,
    "rollout_request_timeout_s": SECONDS,
    "rollout_max_retries": NATURAL,
    "weight_bucket_mb": _at_least(1, 2**20),
    "weight_update_timeout_s": SECONDS,
    "weight_probe_tolerance": POSITIVE,
    "max_staleness": COUNT,
    "mismatch_warn": NOT_NEGATIVE,
    "mismatch_stop": POSITIVE,
    "over_sampling_batch_size": COUNT,
    "budget_margin": NOT_NEGATIVE,
    "budget_ema": LESS_THAN_ONE,
    "max_num_gen_batches": COUNT,
    "max_gen_seconds": Range(0, YEAR),  # 0: one wave
    "reward_num_workers": NATURAL,
    "reward_timeout_s": SECONDS,
    "overlong_buffer_len": NATURAL,
    "overlong_penalty_factor": NOT_NEGATIVE,
    "reward_clip": POSITIVE,
    "advantage_clip": POSITIVE,
    "eps_clip": Range(0, 1, above=True, below=True),
    "eps_clip_high": POSITIVE,
    "eps_clip_c": Range(1, math.inf, above=True, below=True),
    "loss_norm_length": COUNT,
    "entropy_coef": NOT_NEGATIVE,
    "kl_coef": NOT_NEGATIVE,
    "tis_clip": POSITIVE,
    "icepop_range": NOT_NEGATIVE,
    "num_steps_per_rollout": COUNT,
    "max_tokens_per_gpu": COUNT,
    "lr_warmup_rollouts": NATURAL,
    "max_skipped_updates": NATURAL,
    "n_samples_per_eval_prompt": COUNT,
    "eval_temperature": Range(0.01, 100, special=(0,)),
    "eval_top_p": Range(0, 1, above=True),
    "eval_top_k": TOP_K,
    "eval_max_response_len": COUNT,
    "alarm_entropy": NOT_NEGATIVE,
    "actor_num_nodes": COUNT,
    "actor_num_gpus_per_node": COUNT,
}
"""By option; of a list, every item."""

MEGATRON: dict[str, Range] = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
            "expert_tensor_parallel_size", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
            "ffn_hidden_size", "kv_channels", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "vocab_size",
            "make_vocab_size_divisible_by", "padded_vocab_size", "max_position_embeddings", "global_batch_size",
            "lr_decay_iters", "recompute_num_layers", "seed", "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage", "distributed_timeout_minutes", "exit_duration_in_mins",
        ),
        COUNT,
    ),
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_init", "weight_decay", "clip_grad"), NOT_NEGATIVE),
    **dict.fromkeys(("adam_eps", "norm_epsilon", "layernorm_epsilon", "init_method_std", "rope_scaling_factor", "rotary_base"),
        POSITIVE,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum", "attention_dropout", "hidden_dropout"), LESS_THAN_ONE),
    **dict.fromkeys(("lr_warmup_fraction", "rotary_percent"), SHARE),
}  # fmt: skip
"""By destination. Megatron's other numbers are finite, and not negative (``MAY_BE_NEGATIVE``: those that may be)."""

MAY_BE_NEGATIVE = frozenset({
    "null_tokenizer_pad_id", "inference_batch_times_seqlen_threshold", "rl_default_top_k", "fp8_margin", "glu_linear_offset",
    "activation_func_clamp_value", "moe_router_force_biased", "local_rank", "rl_importance_sampling_truncation_coef",
    "mup_attn_scale_power", "moe_router_topk_scaling_factor",
})  # fmt: skip


class Ranged:
    """A part of the options whose numbers lie in their ranges, from the command line or from Python.

    Raises:
        InputError: of the constructor: a number is outside its range, or none.
    """

    def __post_init__(self) -> None:
        check_ranges({f.name: getattr(self, f.name) for f in fields(self)}, RANGES)  # type: ignore[arg-type]


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """Refuse the first value outside its range; None is an option that is not given.

    Raises:
        InputError: it names the flag, the value and the range.
    """
    for name in values.keys() & ranges.keys():
        value = values[name]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is not None and item not in ranges[name]:
                raise InputError(f"--{name.replace('_', '-')} {item}: out of range; give {ranges[name]}")


def check_megatron_ranges(values: Mapping[str, Any]) -> None:
    """Refuse Megatron's flags outside their ranges, and whatever number of Megatron's is not finite.

    Raises:
        InputError: it names the flag, the value and the range.
    """
    known = RANGES.keys() | MEGATRON.keys()
    finite = Range(-math.inf, math.inf, above=True, below=True)
    kept = {name: value for name, value in values.items() if name not in known and _is_number(value)}
    check_ranges(kept, {name: finite if name in MAY_BE_NEGATIVE else NOT_NEGATIVE for name in kept})
    check_ranges(values, MEGATRON)


def _is_number(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, numbers.Real) and not isinstance(item, bool) for item in items)
