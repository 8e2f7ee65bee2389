"""SGLang on a machine without a GPU: a platform of its own plug-in interface that answers every fused kernel with plain torch.

SGLang's CPU engine wants a compiled kernel package that PyPI does not have. This platform names the "native" kernels instead:
collectives over gloo, attention in torch, no graphs. ``pyproject.toml`` registers ``activate`` in the group
``sglang.srt.platforms``; ``servers.fleet`` selects it by name. The only module that imports sglang, inside a server only.
"""

from __future__ import annotations

from typing import Any

NAME = "megatron_dapo_cpu"
"""What SGLANG_PLATFORM is set to."""


def activate() -> str | None:
    """Where SGLang finds the platform class; None on a machine with CUDA, which needs none of this."""
    import torch

    return None if torch.cuda.is_available() else f"{__name__}:NativeCpuPlatform"


def __getattr__(name: str) -> Any:
    """The class is made when SGLang asks for it: importing this module must not import sglang."""
    if name != "NativeCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """A CPU whose kernels are all torch's own."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"

        def empty_cache(self) -> None:
            """Nothing: there is no cache, and SGLang's collection of garbage takes half a second of every publication."""

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

        def get_dispatch_key_name(self) -> str:
            return "native"

    globals()[name] = NativeCpuPlatform
    return NativeCpuPlatform
