"""What the machine lacks, in one place: the same program runs on CUDA with NCCL and on a CPU with gloo.

``install()`` comes before the first import of megatron, ``apply_megatron_fixes()`` before its initialisation.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import warnings

import torch

from megatron_dapo.compat import cpu

PORTABLE_FLAGS = (
    "--transformer-impl", "local", "--attention-backend", "unfused",
    "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion",
)  # fmt: skip
"""Megatron's flags for layers in plain torch: without Transformer Engine and Apex, on any device."""

CPU_FLAGS = ("--distributed-backend", "gloo", "--use-cpu-initialization")
"""And those that a machine without CUDA needs besides."""


def install() -> None:
    """Make ``import megatron`` and its use possible on this machine; call it before that import. Idempotent.

    Without CUDA: one thread per process (two processes of two threads on two cores are ten times slower than of one) and no
    compilation, unless the environment says otherwise, and ``torch.cuda`` answered by the CPU. Where CUDA works: only
    Megatron's chatter is silenced.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if not cpu.install():
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))


def apply_megatron_fixes() -> None:
    """Fix what Megatron lacks on this machine (see ``megatron_fixes``); imports megatron. Idempotent."""
    from megatron_dapo.compat import megatron_fixes

    megatron_fixes.apply()


def default_flags() -> list[str]:
    """Megatron flags that this machine needs; they come before the user's, which win."""
    if not torch.cuda.is_available():
        return [*PORTABLE_FLAGS, *CPU_FLAGS]
    return ["--transformer-impl", "transformer_engine"] if has_transformer_engine() else list(PORTABLE_FLAGS)


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else cpu.CPU


@functools.cache
def has_transformer_engine() -> bool:
    """True where the torch part of Transformer Engine loads (PyPI's package alone has none, or lacks its libraries)."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


PEAK_FLOPS = {
    "GB300": 2500e12, "B300": 2500e12, "GB200": 2500e12, "B200": 2250e12, "H200": 989e12, "GH200": 989e12,
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H800": 989e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "A40": 150e12, "A10": 125e12, "L4": 121e12,
}  # fmt: skip
"""Dense bf16 FLOP/s by a part of the GPU's name, after the data sheets."""


def peak_flops() -> float | None:
    """The GPU's dense bf16 FLOP/s; None on a CPU, and on a GPU that ``PEAK_FLOPS`` does not have."""
    return peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def peak_of(gpu: str) -> float | None:
    """A GPU's by its name: the longest entry of ``PEAK_FLOPS`` that stands in it as words."""
    words = f" {gpu.replace('-', ' ')} "
    found = [name for name in PEAK_FLOPS if f" {name} " in words and " MIG " not in words]  # a slice has a part of it
    return PEAK_FLOPS[max(found, key=len)] if found else None


def max_memory_gb() -> float:
    """Most memory this process has held, in GiB: of the GPU's allocator, or resident on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated() / 2**30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
