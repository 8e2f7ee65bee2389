"""Megatron checkpoint -> Hugging Face checkpoint that transformers and SGLang load.

    python tools/convert_megatron_to_hf.py --load runs/x/checkpoints --hf-checkpoint models/Qwen2.5-7B --out x-hf --bf16

--hf-checkpoint is what the run began with: config.json, tokenizer and generation config come from there. Large models:
under torchrun with Megatron's parallel flags; every process writes its own shards. The folder appears whole or not at all.
"""

from __future__ import annotations

import sys
import tempfile

from megatron_dapo.types import InputError


def main(argv: list[str] | None = None) -> int:
    """Convert; 2 and one line where the input has to be mended."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        if "--out" not in argv[:-1]:
            raise InputError("--out DIR is missing; see --help")
        at = argv.index("--out")
        convert([*argv[:at], *argv[at + 2 :]], argv[at + 1])
    except InputError as error:
        print(f"convert_megatron_to_hf: error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(argv: list[str], out: str) -> None:
    """Load the model, write its tensors.

    Raises:
        InputError: a flag is missing, or the checkpoint is of another shape.
    """
    from megatron_dapo import platform

    platform.install()
    from megatron_dapo.training.arguments import parse
    from megatron_dapo.training.checkpoint import has_checkpoint
    from megatron_dapo.training.setup import build_trainer, shut_down
    from megatron_dapo.weights.gather import save_hf

    args, options = parse(["--run-dir", tempfile.mkdtemp(prefix="convert_"), *argv])
    if not args.hf_checkpoint or not has_checkpoint(args.load):
        raise InputError(f"--load {args.load}: no Megatron checkpoint there, or --hf-checkpoint is missing; see --help")
    args.skip_train = True
    trainer = build_trainer(args, options)
    save_hf(trainer.model, args.hf_checkpoint, out)
    if args.rank == 0:
        print(f"{args.load} -> {out}")
    shut_down()


if __name__ == "__main__":
    sys.exit(main())
