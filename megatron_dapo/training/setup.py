"""Bring Megatron up: process group, globals, model, optimizer, scheduler, checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training import training as megatron_training
from megatron.training.global_vars import set_global_variables
from megatron.training.initialize import initialize_megatron

from megatron_dapo import compat
from megatron_dapo.config import Options
from megatron_dapo.distributed.launcher import free_port
from megatron_dapo.training.argument_checks import sequence_multiple
from megatron_dapo.training.batch import Layout
from megatron_dapo.training.checkpoint import choose_checkpoint, load_weights, saved_arguments
from megatron_dapo.training.model import model_provider
from megatron_dapo.training.reference import ReferencePolicy
from megatron_dapo.training.resume import apply_settings, changes, check_resume, settings_of_checkpoint
from megatron_dapo.training.step import Trainer


def build_trainer(args: Any, options: Options) -> Trainer:
    """Initialise Megatron and build the trainer; the checkpoint, where there is one, is loaded."""
    Path(args.run_dir, "logs").mkdir(parents=True, exist_ok=True)
    _log_to(Path(args.run_dir, "logs", f"megatron_rank{args.rank}.log"))
    choose_checkpoint(args)
    saved = saved_arguments(args) if args.resumed and not args.skip_train else None
    if saved is not None:
        check_resume(args, saved)
    with (
        settings_of_checkpoint(args, saved) if saved is not None else contextlib.nullcontext(),
        open(Path(args.run_dir, "logs", f"megatron_rank{args.rank}.log"), "a") as log,
        contextlib.redirect_stdout(log),
    ):
        _initialise(args)
        model, optimizer, scheduler = megatron_training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder, model_provider_func=model_provider
        )
        reference = ReferencePolicy(model, partial(load_weights, model, args.ref_load)) if args.ref_load else None
        if args.load_hf:
            load_weights(model, args.load_hf)
            if optimizer is not None:
                optimizer.reload_model_params()
    if saved is not None:
        scheduler = apply_settings(args, saved, optimizer, scheduler.num_steps)
    args.changed = changes(args, saved) if saved is not None else []
    layout = Layout.of_this_rank(sequence_multiple(args), args)
    return Trainer(args, options, model, optimizer, scheduler, layout, reference)


def _log_to(path: Path) -> None:
    """Megatron's log records go to a file of the run: the console has one line per step."""
    logger = logging.getLogger("megatron")
    logger.propagate = False
    logger.addHandler(logging.FileHandler(path))


def _initialise(args: Any) -> None:
    """Megatron's globals and process groups. Its own trackers stay off: ours logs once, on rank 0, by rollout step."""
    rendezvous_for_one_process()
    trackers = {name: getattr(args, name) for name in ("wandb_project", "tensorboard_dir")}
    args.wandb_project, args.tensorboard_dir = "", None
    set_global_variables(args, build_tokenizer=False)
    vars(args).update(trackers)
    compat.apply_megatron_fixes()
    initialize_megatron(allow_no_cuda=True)


def rendezvous_for_one_process() -> None:
    """Without a launcher (torchrun, srun) the process is its own world."""
    if "RANK" in os.environ:
        return
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def shut_down() -> None:
    """Leave the process group in order, so that no rank waits for one that has gone."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
