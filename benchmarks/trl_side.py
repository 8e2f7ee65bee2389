"""TRL's half of ``against_trl.py``: GRPOTrainer with DAPO's loss, one JSON line per rollout step.

Not a command of its own: ``against_trl.py`` starts it in an environment that has trl (requirements/benchmark.txt).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Train as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder with weights and tokenizer")
    parser.add_argument("--data", required=True, help="JSON lines with question and answer")
    parser.add_argument("--out", required=True)
    for name, default in (("steps", 15), ("prompts", 16), ("samples", 8), ("updates", 2), ("max-response", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-9)
    given = parser.parse_args()

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trainer = make_trainer(given)
    parts: dict[str, float] = {}
    timed(trainer, "_generate_single_turn", "gen", parts)
    timed(trainer, "training_step", "train", parts)
    trainer.add_callback(recorder(given, parts))
    trainer.train()


def make_trainer(given: argparse.Namespace) -> Any:
    """The same prompts per step, samples per prompt, updates, loss, sampling and optimizer as ours."""
    from coin import flip
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in Path(given.data).read_text().splitlines()]
    per_update = given.prompts * given.samples // given.updates // int(os.environ.get("WORLD_SIZE", "1"))
    config = GRPOConfig(
        output_dir=given.out + ".trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=per_update,
        steps_per_generation=given.updates,
        num_generations=given.samples,
        max_completion_length=given.max_response,
        max_steps=given.steps * given.updates,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    return GRPOTrainer(
        model=given.model,
        args=config,
        reward_funcs=lambda completions, **_: [flip(text) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(given.model),
    )


def timed(owner: Any, name: str, part: str, parts: dict[str, float]) -> None:
    """Add the seconds of every call of a method to ``parts``."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - start

    setattr(owner, name, call)


def recorder(given: argparse.Namespace, parts: dict[str, float]) -> Any:
    """A callback that writes the seconds of every rollout step. Generation happens inside the first training step."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start, self.length = time.perf_counter(), 0.0
            Path(given.out).write_text("")

        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            self.length = (logs or {}).get("completions/mean_length", self.length)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % given.updates:
                return
            now = time.perf_counter()
            gen, step = parts.pop("gen", 0.0), now - self.start
            row = {"step": step, "gen": gen, "train": parts.pop("train", 0.0) - gen, "length": self.length}
            row["gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            with open(given.out, "a") as file:
                print(json.dumps(row), file=file)
            self.start = time.perf_counter()

    return Recorder()


if __name__ == "__main__":
    main()
