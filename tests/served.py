"""The tiny task with a Hugging Face model behind it, and real SGLang servers on a CPU, started by ``serve``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from hf_models import COMMON, save_model
from tiny import ALPHABET, MODEL, write_task

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
LAYERS = COMMON["num_hidden_layers"]
VOCAB = len(dict.fromkeys(ALPHABET)) + 3
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256,
    "initializer_range": 0.08,
}  # fmt: skip
UP_S = 500
"""Seconds that servers may take on a busy machine."""


def save_served_model(folder: Path, family: str = "qwen2", **changed: Any) -> Any:
    """A checkpoint that fits the tiny task's tokenizer; the transformers model."""
    return save_model(folder, family, **{**SHAPE, **changed})


def write_served_task(folder: Path, checkpoint: Path, urls: list[str] | None, **overrides: Any) -> Path:
    """Tokenizer, problems and a recipe that generates with the servers at ``urls``; the recipe's path."""
    nothing = dict.fromkeys(MODEL, None) | {"vocab_size": None, "make_vocab_size_divisible_by": 16}
    servers = {"hf_checkpoint": str(checkpoint), "rollout_engine": "sglang", "rollout_server_urls": urls}
    return write_task(folder, **{**nothing, **servers, **overrides})


@contextlib.contextmanager
def served(folder: Path, checkpoint: Path, number: int, *flags: str) -> Iterator[list[str]]:
    """URLs of ``number`` servers of ``checkpoint``, up while the context is."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        "--hf-checkpoint", str(checkpoint), "--run-dir", str(folder), "--rollout-num-servers", str(number),
        "--server-start-timeout-s", str(UP_S), "--sglang-skip-tokenizer-init", "--sglang-max-total-tokens", "8192", *flags,
    ]  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo", "serve", *words]
    said = folder / "serve.txt"
    with open(said, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRONMENT, cwd=folder)
    try:
        deadline = time.monotonic() + UP_S
        while "serving at " not in said.read_text():
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()[-3000:]
            time.sleep(0.2)
        line = next(line for line in said.read_text().splitlines() if line.startswith("serving at "))
        yield line.removeprefix("serving at ").split()
    finally:
        process.terminate()
        process.wait(UP_S)


def listener(url: str) -> int:
    """The process that listens at ``url``."""
    port = int(url.rsplit(":", 1)[1])
    found = [c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"]
    assert found and found[0] is not None, f"nobody listens at {url}"
    return int(found[0])


def train(recipe: Path, *flags: str, ranks: int = 1, ok: bool = True, timeout_s: float = 500) -> str:
    """Run ``train`` to its end; what it said."""
    launcher = [sys.executable, "-W", "ignore", "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [*launcher, "megatron_dapo", "train", str(recipe), *flags]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s)
    assert (done.returncode == 0) is ok, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr
