"""Checkpoints: Megatron's own for model, optimizer, scheduler and RNG; beside it the state of the collector.

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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_dapo.files import replacing
from megatron_dapo.training.step import Trainer
from megatron_dapo.types import InputError
from megatron_dapo.weights.gather import checked_reader, load_hf
from megatron_dapo.weights.hf_folder import is_hf_checkpoint, why_no_weights

SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "num_experts",
)  # fmt: skip
"""Arguments that decide what tensors a checkpoint holds."""

COMPUTATION = (
    "layernorm_epsilon", "normalization", "swiglu", "add_bias_linear", "window_size", "position_embedding_type", "rotary_base",
    "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "rotary_scaling_factor", "mscale", "mscale_all_dim",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
    "moe_router_topk", "moe_router_pre_softmax", "moe_ffn_hidden_size", "moe_layer_freq",
)  # fmt: skip
"""And those that decide what is computed with them."""


def has_checkpoint(folder: str | None) -> bool:
    """True where Megatron's tracker file names a checkpoint."""
    return folder is not None and os.path.isfile(checkpointing.get_checkpoint_tracker_filename(folder))


def check_checkpoints(args: Any) -> None:
    """Refuse weights that are asked for and not there, whole and of this model's shape. Reads no tensor, changes nothing.

    Raises:
        InputError: a folder that --load, --ref-load, --hf-checkpoint or --pretrained-checkpoint names, or the run's own last
            checkpoint, is not what it should be.
    """
    resumed = has_checkpoint(args.save)
    if args.ref_load:
        _check_weights(args, "--ref-load", args.ref_load)
    if resumed:
        _check_weights(args, "--save", args.save)
        if not args.skip_train:
            _rollout_state_path(args.save, _iteration(args.save, "--save", args.ckpt_step), must_exist=True)
    if args.load and (not resumed or (args.kl_coef and not args.ref_load)):
        _check_weights(args, "--load", args.load)
    if getattr(args, "pretrained_checkpoint", None):
        _check_weights(args, "--pretrained-checkpoint", args.pretrained_checkpoint)
    elif args.hf_checkpoint and not (resumed or args.load):
        raise InputError(f"--hf-checkpoint {args.hf_checkpoint}: {why_no_weights(args.hf_checkpoint)}")


def choose_checkpoint(args: Any) -> None:
    """Resume from ``--save`` where the run already has a checkpoint; otherwise start from the weights in ``--load``,
    Megatron's or a Hugging Face checkpoint.
    The reference policy of a KL term is ``--ref-load``, or what ``--load`` named.

    Raises:
        InputError: see ``check_checkpoints``.
    """
    check_checkpoints(args)
    args.resumed = has_checkpoint(args.save)
    args.load_hf = None
    args.ref_load = (args.ref_load or args.load) if args.kl_coef else None
    if args.resumed:
        args.load = args.save
    elif is_hf_checkpoint(args.load):
        args.load, args.load_hf = None, args.load
    elif args.load:
        args.finetune = args.no_load_optim = args.no_load_rng = True


def _iteration(folder: str, flag: str, step: int | None = None) -> int | None:
    """The iteration that Megatron's tracker file names, or ``step`` where one is given; None: a release."""
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(folder))
    text = tracker.read_text(errors="replace").strip()
    if step:
        return step
    if text == "release":
        return None
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{flag} {folder}: {tracker.name} holds {text[:20]!r}, no iteration; {_way_out(folder)}")
    return int(text)


def _way_out(folder: str) -> str:
    there = sorted(path.name for path in Path(folder).glob("iter_*") if path.joinpath("metadata.json").is_file())
    return f"write the number of a whole one into it ({', '.join(there) or 'none'} there), or name another folder"


def checkpoint_folder(folder: str, flag: str = "--load", step: int | None = None) -> str:
    """The folder of the iteration that Megatron's tracker file in ``folder`` names, or of ``step``.

    Raises:
        InputError: the tracker names nothing.
    """
    iteration = _iteration(folder, flag, step)
    release = iteration is None
    path: str = checkpointing.get_checkpoint_name(folder, iteration or 0, release, return_base_dir=True)
    return path


def named_iteration(args: Any, folder: str) -> int | None:
    """The iteration that loading ``folder`` takes: --ckpt-step's, or the tracker file's; None for Hugging Face's."""
    return _iteration(folder, "--load", args.ckpt_step) if has_checkpoint(folder) else None


def _check_weights(args: Any, flag: str, folder: str) -> None:
    """Hugging Face's or Megatron's, by their headers."""
    if is_hf_checkpoint(folder):
        checked_reader(folder)
        return
    if not has_checkpoint(folder):
        if Path(folder, "config.json").is_file():
            raise InputError(f"{flag} {folder}: {why_no_weights(folder)}")
        raise InputError(f"{flag} {folder}: no checkpoint there (latest_checkpointed_iteration.txt is missing)")
    path = Path(checkpoint_folder(folder, flag, args.ckpt_step))
    if missing := _missing_file(path):
        says = f"its tracker names {path.name}" if not args.ckpt_step else f"--ckpt-step says {path.name}"
        raise InputError(f"{flag} {folder}: {says}, where {missing} is missing or incomplete; {_way_out(folder)}")
    try:
        saved = dist_checkpointing.load_common_state_dict(str(path))["args"]
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise InputError(
            f"{flag} {folder}: {path.name} cannot be read ({type(error).__name__}); {_way_out(folder)}"
        ) from None
    for name in (*SHAPE, *COMPUTATION):
        if name in COMPUTATION and not hasattr(saved, name):  # an older checkpoint
            continue
        then, now = getattr(saved, name, None), getattr(args, name, None)
        if then != now:
            shape = "--" + name.replace("layernorm", "norm").replace("_", "-")
            raise InputError(f"{flag} {folder}: that model has {shape} {then}, this recipe says {now}; make them equal")


def _missing_file(path: Path) -> str | None:
    """A file of a Megatron checkpoint that is not there, or shorter than it should be."""
    for name in ("metadata.json", ".metadata"):
        if not path.joinpath(name).is_file() or not path.joinpath(name).stat().st_size:
            return name
    try:
        stored = FileSystemReader(path).read_metadata().storage_data or {}
    except Exception:  # a pickle breaks in many ways
        return ".metadata"
    ends: dict[str, int] = {}
    for place in stored.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        if not path.joinpath(name).is_file() or path.joinpath(name).stat().st_size < end:
            return name
    return None


def saved_arguments(args: Any) -> Any:
    """The arguments of the run that wrote the checkpoint which ``args`` resumes from."""
    return dist_checkpointing.load_common_state_dict(checkpoint_folder(args.load, "--save", args.ckpt_step))["args"]


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
        with replacing(_rollout_state_path(trainer.args.save, iteration)) as draft:
            torch.save(rollout_state, draft)
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
    path = _rollout_state_path(args.load, args.iteration, must_exist=True)
    state: dict[str, Any] = torch.load(path, weights_only=False)  # our own file, with dataclasses in it
    return state


def _rollout_state_path(folder: str, iteration: int | None, must_exist: bool = False) -> Path:
    path = Path(folder, "rollout_state", f"iter_{iteration or 0:07d}.pt")
    if must_exist and not path.is_file():
        raise InputError(f"{path}: missing, so prompts and statistics cannot resume; start a new --run-dir with --load")
    return path


@contextlib.contextmanager
def _megatron_chatter() -> Iterator[None]:
    """Megatron reports every save on several lines; our console has one line per step."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
