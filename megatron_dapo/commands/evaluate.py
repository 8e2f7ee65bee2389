"""``python -m megatron_dapo eval``: one evaluation of a checkpoint."""

from __future__ import annotations

from argparse import Namespace

from megatron_dapo.config import Options
from megatron_dapo.loop import Run
from megatron_dapo.training import checkpoint
from megatron_dapo.training.setup import shut_down
from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_folder import is_hf_checkpoint


def evaluate_checkpoint(args: Namespace, options: Options) -> None:
    """One evaluation, written to the run's folder: of --load or --hf-checkpoint (Megatron's or a Hugging Face checkpoint) on the
    command line; else of the run's last checkpoint; else of the recipe's weights."""
    if args.load and (args.names_weights or not checkpoint.has_checkpoint(args.save)):
        args.save = args.load
    if not (checkpoint.has_checkpoint(args.save) or is_hf_checkpoint(args.save)):
        raise InputError(f"{args.save}: no checkpoint there to evaluate; give --load DIR")
    args.skip_train = args.no_load_optim = args.no_load_rng = True
    run = Run(args, options, evaluation_only=True)
    try:
        run.say_what_is_long()
        run.evaluate(args.iteration)
    finally:
        run.close()
    shut_down()
