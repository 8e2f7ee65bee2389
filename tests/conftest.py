"""Before any test imports torch or megatron: one thread, no GPU, and torch.cuda answered by the CPU.

Tests that need a GPU start their own processes: this one must stay fit to be forked (see ``distributed_helper``).
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from megatron_dapo import platform  # noqa: E402

platform.install()
