"""``python -m megatron_dapo train|eval|serve|plan|doctor``: thin and guarded, for Megatron's checkpoint writer imports it."""

from __future__ import annotations

import sys

USAGE = """usage: python -m megatron_dapo COMMAND [RECIPE.toml] [--flag value ...]

  train   train a policy (under torchrun or srun for more than one process); --dry-run only prints the plan
  eval    evaluate a checkpoint (--load DIR, or the run's last) on --eval-prompt-data; writes a report to <run_dir>/eval
  serve   start SGLang servers alone, for trainers elsewhere (--rollout-server-urls)
  plan    print the resolved recipe, the layout of ranks and the batch arithmetic; needs no GPU and no weights
  doctor  print what is installed here and what you do without where something is missing
  version print the version

`train --help` lists every flag: Megatron's, then DAPO's. A recipe is a TOML file of flag names; the command line wins."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 when it did what was asked, 2 when the user has something to fix (one line says what)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if argv[0] in ("-V", "--version", "version"):
        from megatron_dapo import __version__

        print(f"megatron_dapo {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    from megatron_dapo.types import InputError

    try:
        return _run(command, rest)
    except InputError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        from megatron_dapo.commands.doctor import cost_of

        package = (error.name or "").partition(".")[0]
        if (cost := cost_of(package)) is None:
            raise
        return _refuse(f"{package} is not installed ({cost}): install it, or do without what needs it")


def _refuse(message: str) -> int:
    """Say it once, whatever the number of ranks; the exit code."""
    import os

    if int(os.environ.get("RANK", "0")) == 0:
        print(f"megatron_dapo: error: {message}", file=sys.stderr)
    return 2


def _run(command: str, rest: list[str]) -> int:
    from megatron_dapo.types import InputError

    if command == "doctor":
        from megatron_dapo.commands import doctor

        return doctor.main(rest)
    if command not in ("train", "eval", "serve", "plan"):
        raise InputError(f"unknown command '{command}': use train, eval, serve, plan, doctor or version")
    from megatron_dapo import compat
    from megatron_dapo.distributed.launcher import adopt_slurm_ranks

    compat.install()
    if command in ("train", "eval"):
        adopt_slurm_ranks()
    from megatron_dapo.training.arguments import parse, parse_for_servers
    from megatron_dapo.training.model_flags import Purpose

    if command == "serve":
        from megatron_dapo.commands.serve import serve

        serve(parse_for_servers(rest))
        return 0
    purpose: Purpose = "evaluate" if command == "eval" else "train"
    args, options = parse([*rest, "--dry-run"] if command == "plan" else rest, purpose)
    if args.dry_run:
        from megatron_dapo.commands.plan import describe

        print(describe(args, options))
        return 0
    if command == "eval":
        from megatron_dapo.commands.evaluate import evaluate_checkpoint

        evaluate_checkpoint(args, options)
    else:
        from megatron_dapo.loop import train

        train(args, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
