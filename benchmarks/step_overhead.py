"""Share of a rollout step that is neither generation, nor reward, nor training; aim: at most 5%.

The quick start's run, whole, in one process, from an untrained policy: sampling, filtering, shaping, packing, tracking,
dumps. Timed are the engine's ``generate``, the pool's ``score``, and the trainer's two passes; the rest is overhead.

    python benchmarks/step_overhead.py [--rollouts 14]
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pairs import spread

ROOT = Path(__file__).parents[1]
SKIPPED = 2
"""First steps, in which things are made once."""


def timed(owner: Any, name: str, seconds: dict[str, list[float]]) -> None:
    """Count the wall-clock seconds of every call of ``owner.name``."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.setdefault(name, []).append(time.perf_counter() - start)

    setattr(owner, name, wrapped)


def main() -> None:
    """Run, and print the share step by step and where it lies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=14)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megatron_dapo_bench_"))
    task = [sys.executable, ROOT / "examples/quickstart_task.py", "--out", folder, "--tokenizer", folder / "tokenizer"]
    subprocess.run([*map(str, task), "--num-warmup", "1"], check=True, stdout=subprocess.DEVNULL)

    from megatron_dapo import compat

    compat.install()
    from megatron_dapo import loop
    from megatron_dapo.rewards.pool import RewardPool
    from megatron_dapo.rollout.embedded import EmbeddedEngine
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.step import Trainer

    seconds: dict[str, list[float]] = {}
    for owner, name in (
        (EmbeddedEngine, "generate"),
        (RewardPool, "score"),
        (Trainer, "fill_old_logprobs"),
        (Trainer, "update"),
    ):
        timed(owner, name, seconds)
    flags = {
        "run_dir": folder / "run", "tokenizer_model": folder / "tokenizer",
        "prompt_data": folder / "train.jsonl", "eval_prompt_data": folder / "heldout.jsonl",
        "num_rollout": given.rollouts, "save_interval": 0, "eval_interval": 0, "load": "", "max_num_gen_batches": 1,
        "on_exhausted": "keep_zero_signal",
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in ("--" + key.replace("_", "-"), str(value))]
    loop.train(*parse([str(ROOT / "examples/quickstart.toml"), *words, "--no-eval-before-train", "--no-progress"]))
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    calls = {name: len(values) // len(rows) for name, values in seconds.items()}
    shares = []
    for number, row in enumerate(rows):
        work = sum(sum(v[number * calls[name] : (number + 1) * calls[name]]) for name, v in seconds.items())
        shares.append(1 - work / row["timing_s/step"])
    print(f"share of a step outside generation, reward and training: {spread(shares[SKIPPED:])}")
    whole = sum(row["timing_s/step"] for row in rows[SKIPPED:])
    for name, values in seconds.items():
        print(f"  {name}: {sum(values[SKIPPED * calls[name] :]) / whole:.1%} of the time")


if __name__ == "__main__":
    main()
