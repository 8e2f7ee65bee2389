"""All of DAPO's options together, and the numbers that follow from several of them."""

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from megatron_dapo.config.options import (
    AdvantageOptions,
    DataOptions,
    EvalOptions,
    LossOptions,
    MismatchOptions,
    ModelOptions,
    OverlapOptions,
    PlanOptions,
    PublishOptions,
    ReplayOptions,
    RewardOptions,
    RolloutOptions,
    SamplerOptions,
    ServerOptions,
    TrackingOptions,
    UpdateOptions,
)
from megatron_dapo.types import InputError, SamplingParams


@dataclass(frozen=True)
class Options:
    """All of DAPO's options, by part."""

    model: ModelOptions
    data: DataOptions
    rollout: RolloutOptions
    server: ServerOptions
    publish: PublishOptions
    overlap: OverlapOptions
    mismatch: MismatchOptions
    sampler: SamplerOptions
    reward: RewardOptions
    advantage: AdvantageOptions
    loss: LossOptions
    update: UpdateOptions
    eval: EvalOptions
    tracking: TrackingOptions
    replay: ReplayOptions
    plan: PlanOptions

    @classmethod
    def from_args(cls, args: Namespace | None = None, **overrides: Any) -> "Options":
        """Read every part out of parsed ``args``; what is absent keeps its default; ``overrides`` win."""
        given = {**(vars(args) if args is not None else {}), **overrides}
        parts = {}
        for part in fields(cls):
            kind: Any = part.type
            parts[part.name] = kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})
        return cls(**parts)

    @property
    def wave_size(self) -> int:
        """Prompts of a full wave."""
        if self.sampler.over_sampling_batch_size:
            return self.sampler.over_sampling_batch_size
        return self.rollout.rollout_batch_size * (3 if self.sampler.dynamic_sampling else 1)

    @property
    def longest_sequence(self) -> int:
        """Most tokens a prompt and its response can have together."""
        return self.data.rollout_max_prompt_len + self.rollout.rollout_max_response_len

    def token_budget(self, cp_size: int, multiple: int) -> int:
        """Padded tokens of a micro-batch, over its context-parallel ranks together; lengths are padded to ``multiple``.

        Raises:
            InputError: --max-tokens-per-gpu cannot hold the longest sequence the recipe allows.
        """
        longest = -(-self.longest_sequence // multiple) * multiple
        given = self.update.max_tokens_per_gpu
        if given is not None and given * cp_size < longest:
            raise InputError(
                f"--max-tokens-per-gpu {given} x context-parallel {cp_size} = {given * cp_size} cannot hold the longest prompt "
                f"plus response, {longest} tokens; raise it to {-(-longest // cp_size)}"
            )
        return longest if given is None else given * cp_size

    def train_sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """How rollouts are drawn."""
        r = self.rollout
        return SamplingParams(
            r.rollout_max_response_len,
            r.rollout_temperature,
            r.rollout_top_p,
            r.rollout_top_k,
            stop_token_ids,
        )

    def eval_sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """How evaluation responses are drawn."""
        e = self.eval
        longest = e.eval_max_response_len or self.rollout.rollout_max_response_len
        return SamplingParams(longest, e.eval_temperature, e.eval_top_p, e.eval_top_k, stop_token_ids)


OPTION_PARTS: tuple[type[Any], ...] = tuple(get_type_hints(Options).values())
"""The dataclasses whose fields are flags, in the order of --help."""
