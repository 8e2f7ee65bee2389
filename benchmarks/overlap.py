"""What generating beside training gains: seconds per step in sync over those one step off, with a real SGLang server.

On a GPU cluster servers and trainer have machines of their own; here both share this machine's cores, so what is gained is
the time in which one of them would have waited.

    python benchmarks/overlap.py [--steps 8]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from pairs import spread

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

TASK = {
    "rollout_batch_size": 16, "n_samples_per_prompt": 8, "over_sampling_batch_size": 16, "global_batch_size": 64,
    "rollout_max_response_len": 96, "overlong_buffer_len": 0, "save_interval": 0, "dynamic_sampling": False,
}  # fmt: skip


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    from served import save_served_model, served, train, write_served_task

    folder = Path(tempfile.mkdtemp(prefix="megatron_dapo_bench_"))
    save_served_model(folder / "hf", hidden_size=128, intermediate_size=512, max_position_embeddings=512)
    times: dict[str, list[float]] = {}
    with served(folder / "serve", folder / "hf", 1) as urls:
        for mode in ("sync", "one_step_off"):
            task = {**TASK, "num_rollout": given.steps, "rollout_mode": mode}
            recipe = write_served_task(folder / mode, folder / "hf", urls, **task)
            train(recipe, timeout_s=1200)
            rows = [json.loads(line) for line in (folder / mode / "run/metrics.jsonl").read_text().splitlines()]
            times[mode] = [row["timing_s/step"] for row in rows[2:]]  # the first two have nothing generated ahead
            print(f"{mode}: {spread(times[mode])} s a step")
    print(
        f"sync over one step off: {spread([a / b for a, b in zip(times['sync'], times['one_step_off'], strict=True)])}"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
