"""What a run tells: the table of metrics, where they are written, what the screen shows, where the time goes."""

from megatron_dapo.tracking.clock import Clock
from megatron_dapo.tracking.console import RolloutProgress, alarms, console_line
from megatron_dapo.tracking.metrics import METRICS, Metric, average, row_of, unknown_metrics
from megatron_dapo.tracking.tracker import Tracker, check_places

__all__ = [
    "METRICS",
    "Clock",
    "Metric",
    "RolloutProgress",
    "Tracker",
    "alarms",
    "average",
    "check_places",
    "console_line",
    "row_of",
    "unknown_metrics",
]
