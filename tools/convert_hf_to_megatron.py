"""Hugging Face checkpoint -> Megatron checkpoint, for runs that restart often; a run can also --load the folder as it is.

    python tools/convert_hf_to_megatron.py --hf-checkpoint models/Qwen2.5-7B --save models/Qwen2.5-7B-megatron --bf16
    torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py ... --tensor-model-parallel-size 8      # large models

The checkpoint loads under any parallel layout. Each process holds its part of the model; flags are Megatron's.
"""

from __future__ import annotations

import sys
import tempfile

from megatron_dapo.types import InputError


def main(argv: list[str] | None = None) -> int:
    """Convert; 2 and one line where the input has to be mended."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        convert(argv)
    except InputError as error:
        print(f"convert_hf_to_megatron: error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(argv: list[str]) -> None:
    """Build the model, fill it, save it.

    Raises:
        InputError: a flag is missing, or the checkpoint is not whole.
    """
    from megatron_dapo import platform

    platform.install()
    from megatron_dapo.training import checkpoint
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.setup import build_trainer, shut_down

    args, options = parse(["--run-dir", tempfile.mkdtemp(prefix="convert_"), *argv])
    if not args.hf_checkpoint or "--save" not in argv:
        raise InputError("--hf-checkpoint DIR and --save DIR are needed; see --help")
    if checkpoint.has_checkpoint(args.save):
        raise InputError(f"--save {args.save}: there is a checkpoint already; remove it or name another folder")
    args.skip_train = args.no_save_optim = args.no_save_rng = True
    checkpoint.save(build_trainer(args, options), 0, None)
    if args.rank == 0:
        print(f"{args.hf_checkpoint} -> {args.save}")
    shut_down()


if __name__ == "__main__":
    sys.exit(main())
