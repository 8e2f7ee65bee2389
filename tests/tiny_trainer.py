"""Megatron's trainer on a tiny model, and ragged samples to train it on, without a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny import MODEL

from megatron_dapo.config.recipe import toml_value
from megatron_dapo.training.arguments import parse
from megatron_dapo.training.batch import build_minibatch
from megatron_dapo.training.setup import build_trainer
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import Sums, Trajectories, merge_sums

VOCAB = 27
MAX_PROMPT, MAX_RESPONSE = 8, 24

STEP = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "global_batch_size": 16,
    "num_steps_per_rollout": 1,
    "rollout_max_prompt_len": MAX_PROMPT,
    "rollout_max_response_len": MAX_RESPONSE,
    "overlong_buffer_len": 0,
    "vocab_size": VOCAB,
    "lr": 1e-3,
    "lr_warmup_rollouts": 0,
}


def trainer_of(folder: Path, *flags: str, **overrides: Any) -> Trainer:
    """The trainer of MODEL and STEP, changed by ``overrides`` of the recipe and by ``flags``; inside a process group."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.toml"
    values = {**MODEL, **STEP, "run_dir": str(folder / "run"), **overrides}
    recipe.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in values.items()))
    return build_trainer(*parse([str(recipe), *flags]))


def trainer_from_hf(folder: Path, checkpoint: Path, *flags: str) -> Trainer:
    """The trainer of a Hugging Face checkpoint and STEP, changed by ``flags``; inside a process group."""
    step = {key: value for key, value in STEP.items() if key != "vocab_size"}
    words = [word for key, value in step.items() for word in ("--" + key.replace("_", "-"), str(value))]
    run = ("--run-dir", str(folder / "run"), "--save-interval", "0", "--make-vocab-size-divisible-by", "16")
    return build_trainer(*parse([*words, *run, "--hf-checkpoint", str(checkpoint), *flags]))


def rows_of(n: int = 16, **replaced: Any) -> Trajectories:
    """Ragged samples: one of a single response token, one fully masked, one at the limit, the rest as they come."""
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(2, MAX_PROMPT + 1, n), rng.integers(2, MAX_RESPONSE + 1, n)
    response[1], response[5] = 1, MAX_RESPONSE
    mask = [np.ones(r, bool) for r in response]
    mask[2][:] = False
    columns: dict[str, Any] = {
        "tokens": [rng.integers(2, VOCAB, p + r) for p, r in zip(prompt, response, strict=True)],
        "prompt_lengths": prompt,
        "rollout_logprobs": [np.full(r, -3.0, np.float32) for r in response],
        "loss_mask": mask,
        "advantages": rng.normal(size=n),
        "rewards": np.zeros(n),
        "acc": np.zeros(n),
        "group": np.arange(n) // 4,
        "weight_version": np.zeros(n, np.int64),
    }
    return Trajectories(**(columns | replaced))


def step(trainer: Trainer, rows: Trajectories) -> Sums:
    """One optimizer step; metrics of all ranks."""
    local = trainer.update(build_minibatch(rows, trainer.options, trainer.layout))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return merge_sums(*parts)


def flat_weights(trainer: Trainer) -> torch.Tensor:
    """This rank's parameters in one row."""
    return torch.cat([p.detach().flatten() for chunk in trainer.model for p in chunk.parameters()])
