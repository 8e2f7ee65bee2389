"""Checkpoints: Megatron's own for model, optimizer, scheduler and RNG; beside it the state of the rollout side.

``<save>/rollout_state/iter_0000012.pt`` is written before Megatron's tracker file names iteration 12, so whatever the
tracker points at is complete. The iteration is the number of finished rollout steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing

from megatron_dapo.training.step import Trainer
from megatron_dapo.types import InputError
from megatron_dapo.weights.gather import load_hf
from megatron_dapo.weights.hf_io import is_hf_checkpoint

SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "num_experts",
)  # fmt: skip
"""Arguments that decide what tensors a checkpoint holds."""


def has_checkpoint(folder: str | None) -> bool:
    """True where Megatron's tracker file names a checkpoint."""
    return folder is not None and os.path.isfile(checkpointing.get_checkpoint_tracker_filename(folder))


def choose_checkpoint(args: Any) -> None:
    """Resume from ``--save`` where the run already has a checkpoint; otherwise start from the weights in ``--load``,
    Megatron's or a Hugging Face checkpoint.
    The reference policy of a KL term is ``--ref-load``, or what ``--load`` named.

    Raises:
        InputError: ``--load`` or ``--ref-load`` holds no checkpoint, or one of another shape.
    """
    args.resumed = has_checkpoint(args.save)
    args.load_hf = None
    args.ref_load = (args.ref_load or args.load) if args.kl_coef else None
    if args.ref_load and not is_hf_checkpoint(args.ref_load):
        _check_shape(args, "--ref-load", args.ref_load)
    if args.resumed:
        args.load = args.save
    elif is_hf_checkpoint(args.load):
        args.load, args.load_hf = None, args.load
    elif args.load:
        args.finetune = args.no_load_optim = args.no_load_rng = True
    if args.load:
        _check_shape(args, "--load", args.load)


def checkpoint_folder(folder: str) -> str:
    """The folder of the iteration that Megatron's tracker file in ``folder`` names."""
    iteration, release = checkpointing.read_metadata(checkpointing.get_checkpoint_tracker_filename(folder))
    path: str = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
    return path


def _check_shape(args: Any, flag: str, folder: str) -> None:
    if not has_checkpoint(folder):
        raise InputError(f"{flag} {folder}: no checkpoint there (latest_checkpointed_iteration.txt is missing)")
    path = checkpoint_folder(folder)
    if not Path(path, "metadata.json").is_file():
        raise InputError(f"{flag} {folder}: its tracker names {Path(path).name}, which is missing or incomplete")
    saved = dist_checkpointing.load_common_state_dict(path)["args"]
    for name in SHAPE:
        then, now = getattr(saved, name, None), getattr(args, name)
        if then != now:
            shape = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {folder}: that model has {shape} {then}, this recipe says {now}; make them equal")


def load_weights(model: list[Any], folder: str) -> None:
    """Read weights alone into the model, from a Megatron or a Hugging Face checkpoint of any parallel layout."""
    if is_hf_checkpoint(folder):
        load_hf(model, folder)
        return
    path, chunks = checkpoint_folder(folder), unwrap_model(model)
    metadata = dist_checkpointing.load_content_metadata(path)
    sharded = {f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(sharded, path)
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])


def save(trainer: Trainer, iteration: int, rollout_state: dict[str, Any] | None) -> None:
    """Write a checkpoint after ``iteration`` rollout steps. Collective; ``rollout_state`` counts on rank 0."""
    if dist.get_rank() == 0:
        path = _rollout_state_path(trainer.args.save, iteration)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        torch.save(rollout_state, unfinished)
        os.replace(unfinished, path)
    if trainer.optimizer is not None:
        _begin_optimizer_state(trainer.optimizer)
    with trainer.inference(), _megatron_chatter():
        checkpointing.save_checkpoint(iteration, trainer.model, trainer.optimizer, trainer.scheduler, 0)


def _begin_optimizer_state(optimizer: Any) -> None:
    """Moments of 0 where no step has made any yet (every step so far was skipped): Megatron cannot save what is not there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)
            for group in part.optimizer.param_groups:
                group.setdefault("step", 0)


def load_rollout_state(args: Any) -> dict[str, Any]:
    """The rollout side's state at the iteration that Megatron resumed from."""
    path = _rollout_state_path(args.load, args.iteration)
    if not path.is_file():
        raise InputError(f"{path}: missing, so prompts and statistics cannot resume; start a new --run-dir with --load")
    state: dict[str, Any] = torch.load(path, weights_only=False)  # our own file, with dataclasses in it
    return state


def _rollout_state_path(folder: str, iteration: int) -> Path:
    return Path(folder, "rollout_state", f"iter_{iteration:07d}.pt")


@contextlib.contextmanager
def _megatron_chatter() -> Iterator[None]:
    """Megatron reports every save on several lines; our console has one line a step."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
