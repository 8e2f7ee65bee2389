"""Model FLOPs of the updates, and what share of the hardware's peak they are."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from tiny import write_task

from megatron_dapo import compat
from megatron_dapo.compat import PEAK_FLOPS, peak_of
from megatron_dapo.loop import Run
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.flops import update_flops, utilisation
from megatron_dapo.types import Trajectories

LENGTHS = (5, 28, 17)


def rows(lengths: tuple[int, ...]) -> Trajectories:
    columns: dict[str, Any] = dict.fromkeys(Trajectories.__dataclass_fields__, np.zeros(len(lengths)))
    return Trajectories(**{**columns, "tokens": [np.zeros(n, np.int64) for n in lengths]})


def test_flops_are_those_of_the_products_by_hand(tmp_path):
    """The tiny model: 6 FLOPs per token for a weight in a matrix product, and causal attention within each response."""
    args, _ = parse([str(write_task(tmp_path))])
    layers, hidden, ffn, heads, groups, head = 2, 64, 128, 4, 2, 16
    weights = layers * hidden * (2 * heads * head + 2 * groups * head + 3 * ffn) + hidden * args.padded_vocab_size
    attention = 6 * layers * heads * head * sum(n * n for n in LENGTHS)
    assert update_flops(args, rows(LENGTHS)) == 6 * weights * sum(LENGTHS) + attention


def test_utilisation_is_a_share_of_all_ranks_peaks(tmp_path, monkeypatch):
    args, _ = parse([str(write_task(tmp_path))])
    args.bf16, args.world_size = True, 4
    monkeypatch.setattr(compat, "peak_flops", lambda: 1e9)
    assert utilisation(args, rows(LENGTHS), 0.5) == pytest.approx(update_flops(args, rows(LENGTHS)) / (0.5 * 4 * 1e9))
    args.bf16 = False
    assert utilisation(args, rows(LENGTHS), 0.5) is None


@pytest.mark.parametrize("updated", [True, False])
def test_a_run_on_a_known_gpu_reports_it(tmp_path, monkeypatch, updated):
    """Of the seconds of the updates alone, and where there were any."""
    args, _ = parse([str(write_task(tmp_path))])
    args.bf16, args.world_size = True, 2
    monkeypatch.setattr(compat, "peak_flops", lambda: 1e9)
    lap = {"timing_s/update_actor": 0.25, "timing_s/gen": 9.0, "timing_s/step": 10.0}
    told: list[Any] = []
    run: Any = object.__new__(Run)
    run.args, run.clock = args, Namespace(lap=lambda: lap)
    run.reporter = Namespace(step=lambda *given: told.append(given))
    run.report(7, rows(LENGTHS), {"actor/grad_norm": (1.0, 1.0)} if updated else {})
    ((step, _, seconds, tokens, _, mfu),) = told
    assert (step, seconds, tokens) == (7, lap, sum(LENGTHS))
    assert mfu == (pytest.approx(update_flops(args, rows(LENGTHS)) / (0.25 * 2 * 1e9)) if updated else None)


def test_without_a_known_gpu_there_is_none(monkeypatch):
    monkeypatch.setattr(compat.torch.cuda, "is_available", lambda: False)
    assert utilisation(Namespace(bf16=True, world_size=1), rows(LENGTHS), 1.0) is None


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", PEAK_FLOPS["H100"]),
        ("NVIDIA H100 PCIe", PEAK_FLOPS["H100 PCIe"]),
        ("NVIDIA H100 NVL", PEAK_FLOPS["H100 NVL"]),
        ("NVIDIA H200", PEAK_FLOPS["H200"]),
        ("NVIDIA GH200 480GB", PEAK_FLOPS["GH200"]),
        ("NVIDIA H20", PEAK_FLOPS["H20"]),
        ("NVIDIA A100-SXM4-80GB", PEAK_FLOPS["A100"]),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", PEAK_FLOPS["L40S"]),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_the_peak_of_a_gpu_by_its_name(gpu, peak):
    assert peak_of(gpu) == peak
