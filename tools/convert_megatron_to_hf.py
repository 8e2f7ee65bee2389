"""Megatron checkpoint -> Hugging Face checkpoint that transformers and SGLang load.

    python tools/convert_megatron_to_hf.py --load runs/x/checkpoints --hf-checkpoint models/Qwen2.5-7B --out x-hf --bf16
    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py ...                 # eight processes share the layers

--hf-checkpoint is what the run began with: config.json, tokenizer and generation config come from there. A process holds one
layer at a time and writes its own shards. Flags are Megatron's; those of a layout change nothing. The folder appears whole or
not at all.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Convert; 2 and one line where the input has to be fixed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    from conversion.common import run

    return run("convert_megatron_to_hf", lambda: convert(argv))


def convert(argv: list[str]) -> None:
    """Read the layers of the checkpoint one after the other, write their tensors.

    Raises:
        InputError: a flag is missing, or the checkpoint is of another shape.
    """
    from conversion.common import arguments, model_without_memory, take_flags
    from conversion.streams import hf_tensors

    from megatron_dapo.training.checkpoint import checkpoint_folder, choose_checkpoint, has_checkpoint
    from megatron_dapo.types import InputError
    from megatron_dapo.weights.gather import write_hf
    from megatron_dapo.weights.hf_folder import load_config

    found, rest = take_flags(argv, "--out")
    if not found.out:
        raise InputError("--out DIR is missing; see --help")
    with arguments(rest) as args:
        if not args.hf_checkpoint or not has_checkpoint(args.load):
            raise InputError(
                f"--load {args.load}: no Megatron checkpoint there, or --hf-checkpoint is missing; see --help"
            )
        choose_checkpoint(args)
        model = model_without_memory(args)
        path = checkpoint_folder(args.load)
        planned, tensors = hf_tensors(model, path, load_config(args.hf_checkpoint))
        origin = f"Checkpoint: {Path(path).name}" + (f", recipe: {Path(args.recipe).name}." if args.recipe else ".")
        write_hf(tensors, planned, args.hf_checkpoint, found.out, args.params_dtype, origin)
        if args.rank == 0:
            print(f"{args.load} -> {found.out}")


if __name__ == "__main__":
    sys.exit(main())
