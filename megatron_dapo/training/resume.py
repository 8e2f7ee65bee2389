"""Going on from a run's own checkpoint with other settings: what may change, and how the schedule goes on.

Megatron finds an optimizer's parameter groups by their learning rates and asserts that the schedule is the saved one. So the
checkpoint is loaded under the settings it was written with, and the run's own are applied to what was loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.training.training import get_optimizer_param_scheduler

from megatron_dapo.types import InputError

FIXED = ("optimizer", "use_distributed_optimizer", "bf16", "decoupled_lr", "decoupled_min_lr", "use_mup")
"""What the optimizer's state depends on."""

RATES = ("lr", "min_lr")
"""What Megatron finds parameter groups by."""

NOT_SAID = frozenset({"run_dir", "load", "save", "progress", "dump_rollouts", "rollout_only"})
"""Options of which a resumed run need not say that they changed."""


def check_resume(args: Any, saved: Any) -> None:
    """Refuse what the saved optimizer cannot go on with.

    Raises:
        InputError: it names the first difference.
    """
    several_rates = saved.decoupled_lr is not None or getattr(saved, "use_mup", False)
    for name in (*FIXED, *(RATES if several_rates else ())):
        then, now = getattr(saved, name, None), getattr(args, name, None)
        if then != now:
            raise InputError(
                f"--{name.replace('_', '-')}: the checkpoint in {args.save} was written with {then}, this recipe says {now}, and "
                "its optimizer cannot change that; make them equal, or start a new --run-dir with --load"
            )


@contextlib.contextmanager
def settings_of_checkpoint(args: Any, saved: Any) -> Iterator[None]:
    """Inside, ``args`` has the learning rates that the optimizer was saved with; the schedule is taken as it comes."""
    ours = {name: getattr(args, name) for name in (*RATES, "override_opt_param_scheduler")}
    vars(args).update({name: getattr(saved, name) for name in RATES}, override_opt_param_scheduler=True)
    try:
        yield
    finally:
        vars(args).update(ours)


def apply_settings(args: Any, saved: Any, optimizer: Any, steps_in_samples: int) -> Any:
    """This run's settings for the loaded ``optimizer``; its schedule, where a run with them from the beginning would be.

    ``steps_in_samples`` is the saved scheduler's count, optimizer steps x batch size. A rollout step remains a rollout step
    where their number or size changes, so that warm-up, decay and the length of the run keep their meaning.
    """
    for group in optimizer.param_groups:
        if not (args.decoupled_lr or args.use_mup):  # otherwise they are what they were
            group |= {"max_lr": args.lr, "min_lr": args.min_lr}
        if "betas" in group:
            group |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps}
        if "momentum" in group:
            group["momentum"] = args.sgd_momentum
    steps = steps_in_samples / saved.global_batch_size
    if args.num_steps_per_rollout != saved.num_steps_per_rollout:
        steps = round(steps * args.num_steps_per_rollout / saved.num_steps_per_rollout)
    scheduler = get_optimizer_param_scheduler(optimizer)
    scheduler.step(increment=round(steps) * args.global_batch_size)
    return scheduler


def changes(args: Any, saved: Any) -> list[str]:
    """What the recipe says otherwise than the one that wrote the checkpoint, for the console."""
    then, now = getattr(saved, "resolved", None) or args.resolved, args.resolved
    names = [name for name in (*now, *(then.keys() - now.keys())) if name not in NOT_SAID]
    differ = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name} {_said(then.get(name))} -> {_said(now.get(name))}" for name in differ]


def _said(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else text[:50] + " ..."
