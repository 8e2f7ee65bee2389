"""What both converters share: Megatron brought up without a layout, and a model that has names and shapes but no memory."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_dapo import compat
from megatron_dapo.types import InputError

compat.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training.global_vars import set_global_variables  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_dapo.compat.cpu import FACTORIES  # noqa: E402
from megatron_dapo.training.arguments import parse  # noqa: E402
from megatron_dapo.training.model import model_provider  # noqa: E402
from megatron_dapo.training.setup import rendezvous_for_one_process, shut_down  # noqa: E402
from megatron_dapo.weights.mapping import portable_name  # noqa: E402

LAYOUT = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size", "--expert-tensor-parallel-size",
)  # fmt: skip
"""Flags that a converter takes as 1: a checkpoint has no layout, and processes share the tensors, not parts of them."""

INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
"""Flags of a layout that have no value for none."""


def run(name: str, work: Callable[[], None]) -> int:
    """The exit status of a converter: 0, or 2 and one line (of one process) where the input has to be fixed."""
    try:
        work()
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    return 0


def take_flags(argv: list[str], *flags: str) -> tuple[argparse.Namespace, list[str]]:
    """The values of ``flags``, each of one word, and the other words.

    Raises:
        InputError: a flag has no value.
    """

    def refuse(message: str) -> NoReturn:
        raise InputError(f"command line: {message}")

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    for flag in flags:
        parser.add_argument(flag)
    return parser.parse_known_args(argv)


@contextlib.contextmanager
def arguments(argv: list[str]) -> Iterator[Any]:
    """Megatron's arguments for the model of ``argv`` without a layout; leaves the process group in order at the end.

    Raises:
        InputError: of ``parse``.
    """
    words = take_flags(argv, *LAYOUT, *INTERLEAVED)[1]
    with tempfile.TemporaryDirectory(prefix="convert_") as folder:
        neutral = [word for flag in LAYOUT for word in (flag, "1")]
        args, _ = parse([*words, *neutral, "--run-dir", folder], purpose="convert")
        args.skip_train = args.no_save_optim = args.no_save_rng = True
        yield args
        shut_down()


class _WithoutMemory(TorchFunctionMode):
    """Every new tensor is on the meta device, also where Megatron names another (``torch.device("meta")`` gives way there)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in FACTORIES:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def model_without_memory(args: Any) -> Any:
    """Initialise Megatron and build the whole model on the meta device."""
    rendezvous_for_one_process()
    logger = logging.getLogger("megatron")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    changed = {"wandb_project": "", "tensorboard_dir": None, "init_model_with_meta_device": True}
    before = {name: getattr(args, name) for name in changed}
    vars(args).update(changed)  # the last is for Transformer Engine, which then leaves its parameters unset
    with quiet():
        set_global_variables(args, build_tokenizer=False)
        compat.apply_megatron_fixes()
        initialize_megatron(allow_no_cuda=True)
        with _WithoutMemory():
            model = model_provider()
    assert all(parameter.is_meta for parameter in model.parameters())
    vars(args).update(before)
    args.model_type, args.iteration, args.num_floating_point_operations_so_far = ModelType.encoder_or_decoder, 0, 0
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron reports on several lines what it does; a converter says one."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model by portable name, and the tensors that a checkpoint keeps it in: runs of its memory, one
    behind the other."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: list[ShardedTensor]

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return self.shape.numel() * self.dtype.itemsize

    def memory_of_pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Memory of ``whole``, the contiguous parameter on the CPU, as one tensor a piece, each with a storage of its own."""
        runs = whole.view(-1).view(torch.uint8).numpy()
        tensors, at = [], 0
        for piece in self.pieces:
            shape = chunk_shape(piece)
            size = shape.numel() * self.dtype.itemsize
            tensors.append(torch.from_numpy(runs[at : at + size]).view(self.dtype).view(shape))
            at += size
        assert at == runs.size, f"{self.name}: its pieces have {at} bytes, it has {runs.size}"
        return tensors


def chunk_shape(piece: ShardedTensor) -> torch.Size:
    """The shape of a piece in the checkpoint, where layers and experts are stacked."""
    return torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))


def parameters_of(model: Any, sharded: dict[str, Any]) -> list[Parameter]:
    """The parameters in the order of the layers. ``sharded``: the model's sharded state dict, its factories applied."""
    named = dict(model.named_parameters())
    found = []
    for name, value in sharded.items():
        if name in named:
            pieces = list(nested_values({name: value}))
            found.append(Parameter(portable_name(name), named[name].shape, named[name].dtype, pieces))
    assert len(found) == len(named), f"not in the sharded state: {sorted(named.keys() - sharded.keys())[:5]}"
    return found


def share_of_this_rank(parameters: list[Parameter]) -> list[Parameter]:
    """Neighbours of about as many bytes as every other rank has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, begin, mine = sum(parameter.bytes for parameter in parameters), 0, []
    for parameter in parameters:
        if int((begin + parameter.bytes / 2) / total * ranks) == rank:  # the rank in whose share its middle lies
            mine.append(parameter)
        begin += parameter.bytes
    return mine


def with_progress(share: list[Parameter], title: str) -> Iterator[Parameter]:
    """``share``, with a progress bar on rank 0 at a terminal."""
    silent = dist.get_rank() != 0 or not sys.stderr.isatty()
    size = sum(parameter.bytes for parameter in share)
    with tqdm(total=size, desc=title, unit="B", unit_scale=True, leave=False, disable=silent) as bar:
        for parameter in share:
            yield parameter
            bar.update(parameter.bytes)
