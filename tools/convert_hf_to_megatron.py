"""Hugging Face checkpoint -> Megatron checkpoint, for runs that restart often; a run can also --load the folder as it is.

    python tools/convert_hf_to_megatron.py --hf-checkpoint models/Qwen2.5-7B --save models/Qwen2.5-7B-megatron --bf16
    torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py ...                 # eight processes share the tensors

The checkpoint loads under any parallel layout. A process holds one parameter at a time, so the model may be larger than the
memory. Flags are Megatron's; those of a layout change nothing. The checkpoint appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Convert; 2 and one line where the input has to be fixed."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    from conversion.common import run

    return run("convert_hf_to_megatron", lambda: convert(argv))


def convert(argv: list[str]) -> None:
    """Write the checkpoint: the file that names it, Megatron's tracker, is the last; what has failed is removed.

    Raises:
        InputError: a flag is missing, or the checkpoint is not whole.
    """
    from conversion.common import arguments

    from megatron_dapo.training.checkpoint import choose_checkpoint, has_checkpoint
    from megatron_dapo.types import InputError
    from megatron_dapo.weights.hf_folder import is_hf_checkpoint, why_no_weights

    with arguments(argv) as args:
        if not args.hf_checkpoint or not any(word.partition("=")[0] == "--save" for word in argv):
            raise InputError("--hf-checkpoint DIR and --save DIR are needed; see --help")
        if not is_hf_checkpoint(args.hf_checkpoint):
            raise InputError(f"--hf-checkpoint {args.hf_checkpoint}: {why_no_weights(args.hf_checkpoint)}")
        if has_checkpoint(args.save):
            raise InputError(f"--save {args.save}: there is a checkpoint already; remove it or name another folder")
        choose_checkpoint(args)
        new = not Path(args.save).exists()
        try:
            save(args)
        except BaseException:
            if args.rank == 0:
                remove(Path(args.save), new)
            raise
        if args.rank == 0:
            print(f"{args.hf_checkpoint} -> {args.save}")


def save(args: Any) -> None:
    """Megatron saves, with a strategy that makes every tensor of the Hugging Face checkpoint when it is its turn."""
    import torch
    from conversion.common import model_without_memory, quiet
    from conversion.streams import StreamedSave
    from megatron.training import checkpointing

    model = model_without_memory(args)
    strategy = StreamedSave(model, args.hf_checkpoint)
    if args.rank == 0:
        rollout_state = Path(args.save, "rollout_state", "iter_0000000.pt")
        rollout_state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(None, rollout_state)  # nothing has been rolled out
    with quiet():
        checkpointing.save_checkpoint(0, [model], None, None, 0, checkpointing_context={"save_strategy": strategy})


def remove(folder: Path, whole: bool) -> None:
    """Take away what a failed conversion has written, ``whole``: the folder as well."""
    if whole:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for name in ("latest_checkpointed_iteration.txt", "rollout_state/iter_0000000.pt"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "iter_0000000", ignore_errors=True)
    with contextlib.suppress(OSError):  # others' files are in it, or it is not there
        (folder / "rollout_state").rmdir()


if __name__ == "__main__":
    sys.exit(main())
