"""Options of a run: dataclasses that become flags (``options``), checks across them (``checks``), recipes (``recipe``)."""

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
from megatron_dapo.config.run_options import OPTION_PARTS, Options

__all__ = [
    "OPTION_PARTS",
    "AdvantageOptions",
    "DataOptions",
    "EvalOptions",
    "LossOptions",
    "MismatchOptions",
    "ModelOptions",
    "Options",
    "OverlapOptions",
    "PlanOptions",
    "PublishOptions",
    "ReplayOptions",
    "RewardOptions",
    "RolloutOptions",
    "SamplerOptions",
    "ServerOptions",
    "TrackingOptions",
    "UpdateOptions",
]
