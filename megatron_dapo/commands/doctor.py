"""``python -m megatron_dapo doctor``: what is installed here, and what you do without where something is missing.

Nothing heavy is imported where a version can be read: megatron takes seconds, sglang may fail without a driver.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``cost`` says what is missed without it; ``needed``: the quick start cannot run without it."""

    name: str
    found: str | None
    cost: str = ""
    needed: bool = False


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> list[Finding]:
    if (version := _version("torch")) is None:
        return [Finding("torch", None, "nothing runs: make quickstart installs it", needed=True)]
    import torch
    import torch.distributed as dist

    gpus = (
        [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    listed = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() and gpus else None  # type: ignore[no-untyped-call]
    return [
        Finding("torch", f"{version} (CUDA build {torch.version.cuda or 'none'})", needed=True),
        Finding("GPUs", listed or None, "training runs on the CPU, over gloo: for tests and small policies"),
        Finding("NCCL", nccl, "needs a GPU; gloo takes its place"),
        Finding("gloo", "yes" if dist.is_gloo_available() else None, "no training without a GPU"),
    ]


def _apex() -> Finding:
    """NVIDIA's apex is known by its FusedAdam: PyPI's package of that name is another thing."""
    cost = "Transformer Engine's Adam, or ours, takes its place"
    if importlib.util.find_spec("apex") is None:
        return Finding("apex (NVIDIA)", None, cost)
    try:
        importlib.import_module("apex.optimizers").FusedAdam  # noqa: B018
    except (ImportError, AttributeError, OSError):
        return Finding(
            "apex (NVIDIA)", None, "an 'apex' is installed that is not NVIDIA's: pip uninstall apex. " + cost
        )
    return Finding("apex (NVIDIA)", _version("apex") or "yes")


def _transformer_engine() -> Finding:
    cost = "no FP8 and no fused layers; plain torch layers take their place"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        there = _version("transformer_engine")
        return Finding(
            "Transformer Engine", None, f"{there} is there but does not load ({error}); {cost}" if there else cost
        )
    return Finding("Transformer Engine", _version("transformer_engine") or "yes")


def _packages() -> list[Finding]:
    rows = [
        ("megatron-core", "nothing trains", True),
        ("numpy", "nothing runs", True),
        ("aiohttp", "no client for SGLang servers, and train does not import", True),
        ("requests", "no calls to SGLang servers, and train does not import", True),
        ("tqdm", "no progress bar, and train does not import", True),
        ("psutil", "saving a checkpoint hangs", True),
        ("transformers", "no tokenizer can be read", True),
        ("jinja2", "no chat template can be rendered, and train does not import", True),
        ("reasoning-gym", "no quick-start task, no reasoning-gym rewards", True),
        ("math-verify", "no --reward math, the default: it compares expressions", True),
        ("pyarrow", "no .parquet files", False),
        ("sglang", "rollouts come from the embedded engine only", False),
        ("wandb", "no Weights & Biases; metrics.jsonl is always written", False),
        ("tensorboard", "no TensorBoard, and megatron.training does not import", True),
        ("nltk", "no text_metrics.self_bleu; the text/* metrics do without", False),
        ("matplotlib", "tools/plot_run.py cannot draw", False),
        ("pytest", "no tests: make test installs it", False),
    ]
    return [Finding(name, _version(name), cost, needed) for name, cost, needed in rows]


def cost_of(package: str) -> str | None:
    """What is missed without ``package``; None where it is not one of those that training can do without."""
    found = [finding for finding in _packages() if finding.name.replace("-", "_") == package and not finding.needed]
    return found[0].cost if found else None


def _machine() -> list[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disk = shutil.disk_usage(".").free / 2**30
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        Finding(
            "Python",
            python if sys.version_info >= (3, 12) else None,
            f"{python} is too old: 3.12 is needed",
            needed=True,
        ),
        Finding(
            "machine",
            f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory, {disk:.0f} GiB free on this disk",
        ),
    ]


def report() -> list[Finding]:
    """Everything looked for, in the order printed."""
    checks: list[Callable[[], list[Finding]]] = [
        _machine,
        _torch,
        _packages,
        lambda: [_transformer_engine(), _apex()],
    ]
    return [finding for check in checks for finding in check()]


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 where the quick start can run."""
    findings = report()
    width = max(len(f.name) for f in findings)
    for f in findings:
        print(f"{f.name:<{width}}  {f.found or 'absent: ' + f.cost}")
    missing = [f.name for f in findings if f.needed and f.found is None]
    print(f"\nThe quick start cannot run without {', '.join(missing)}." if missing else "\nThe quick start can run.")
    return 1 if missing else 0
