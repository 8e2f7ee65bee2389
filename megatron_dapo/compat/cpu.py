"""Answers for ``torch.cuda`` on a machine without CUDA, so that Megatron's CUDA-only calls run on the CPU.

Megatron asks torch.cuda for devices, streams, memory and random states, and creates tensors on "cuda". Here the questions
get the CPU's answers and "cuda" means the CPU. ``torch.cuda.is_available()`` stays False, nothing of Megatron is edited,
and where CUDA works nothing is replaced. Everything that is replaced stands in one table, ``_replacements``.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "as_tensor", "linspace", "eye",
    "randperm", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
"""Functions of torch that take ``device`` (and ``pin_memory``)."""
TENSOR_FACTORIES = ("new_tensor", "new_zeros", "new_empty", "new_ones", "new_full")
"""Methods of a tensor that do."""


def is_cuda(device: Any) -> bool:
    """True for what names a CUDA device: "cuda", "cuda:1", torch.device("cuda") or an index."""
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return device.startswith("cuda") if isinstance(device, str) else type(device) is int


class _Stream:
    """A stream of a device that does one thing after another: every wait is over before it begins."""

    cuda_stream, stream_id, device, priority = 0, 0, CPU, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that has happened as soon as it is recorded; ``elapsed_time`` is wall-clock milliseconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None:
        pass

    synchronize = wait

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


class _Generators:
    """``torch.cuda.default_generators``: whatever the index, the CPU's generator."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


def _answer(value: Any) -> Callable[..., Any]:
    """A new function at every call: torch._dynamo keeps a table of these functions and refuses to see one twice."""
    return lambda *args, **kwargs: value


def _on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return create(*args, **kwargs)

    return wrapped


def _tensor_to(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda(args[0]):
            args = (CPU, *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return wrapped


def _tensor_type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizers sort parameters by the names 'torch.cuda.FloatTensor', 'torch.cuda.BFloat16Tensor', ..."""

    @functools.wraps(type_of)
    def wrapped(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(
                self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs
            )
        return type_of(self).replace("torch.", "torch.cuda.", 1)

    return wrapped


def _constants() -> dict[str, Any]:
    """Functions of torch.cuda whose answer never changes."""
    silent = (
        "set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_stream", "_lazy_init",
        "nvtx.range_push", "nvtx.range_pop", "nvtx.mark",
    )  # fmt: skip
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
    properties = types.SimpleNamespace(name="cpu", major=10, minor=0, total_memory=0, multi_processor_count=1)
    answers: dict[str, Any] = {
        **dict.fromkeys(silent),
        **dict.fromkeys(zero, 0),
        **dict.fromkeys(("current_stream", "default_stream", "stream"), _Stream()),
        "is_current_stream_capturing": False,
        "memory_stats": {},
        "mem_get_info": (0, 0),
        "current_device": CPU,
        "device_count": 1,
        "get_device_name": "cpu",
        "get_device_capability": (10, 0),
        "get_device_properties": properties,
    }
    return {f"torch.cuda.{name}": _answer(value) for name, value in answers.items()}


def _random() -> dict[str, Any]:
    """CUDA's random state is the CPU's."""
    get, put = (
        (lambda *args, **kwargs: torch.get_rng_state()),
        (lambda state, *args, **kwargs: torch.set_rng_state(state)),
    )
    return {
        "torch.cuda.default_generators": _Generators(),
        "torch.cuda._lazy_call": lambda call, **kwargs: call(),  # nothing to wait for: the generator lives already
        "torch.cuda.get_rng_state": get,
        "torch.cuda.random.get_rng_state": get,
        "torch.cuda.set_rng_state": put,
        "torch.cuda.random.set_rng_state": put,
        "torch.cuda.manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    }


def _replacements() -> dict[str, Any]:
    """Dotted name -> what stands there instead."""
    tensor = torch.Tensor
    return {
        **_constants(),
        **_random(),
        "torch.cuda.Stream": _Stream,
        "torch.cuda.Event": _Event,
        **{f"torch.{name}": _on_cpu(getattr(torch, name)) for name in FACTORIES},
        **{f"torch.Tensor.{name}": _on_cpu(getattr(tensor, name)) for name in TENSOR_FACTORIES},
        "torch.Tensor.to": _tensor_to(tensor.to),
        "torch.Tensor.type": _tensor_type(tensor.type),
        "torch.Tensor.cuda": lambda self, *args, **kwargs: self,
        "torch.Tensor.pin_memory": lambda self, *args, **kwargs: self,
        "torch.Tensor.record_stream": _answer(None),
    }


def patched_names() -> list[str]:
    """Every name of torch that ``install`` replaces, dotted and sorted."""
    return sorted(_replacements())


def install() -> bool:
    """Replace the names of ``patched_names`` once; True where they are replaced, False where CUDA works."""
    if torch.cuda.is_available():
        return False
    if not hasattr(torch.cuda, "_answered_by_cpu"):
        for name, value in _replacements().items():
            owner, _, attribute = name.removeprefix("torch.").rpartition(".")
            setattr(functools.reduce(getattr, filter(None, owner.split(".")), torch), attribute, value)
        torch.cuda._answered_by_cpu = True  # type: ignore[attr-defined]
    return True
