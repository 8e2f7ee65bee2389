"""Megatron's shards and whole Hugging Face tensors: each rank reads its own slices; shards are gathered a tensor at a time."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from tqdm import tqdm

from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_export import copy_companions
from megatron_dapo.weights.hf_folder import load_config
from megatron_dapo.weights.hf_io import HfReader, HfWriter, Planned, whole_or_not_at_all, write_index
from megatron_dapo.weights.mapping import HfConfig, Rule, portable_name, rules


def local_parameters(model: list[Any], tied: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters by portable name, layers and experts numbered over all ranks. The last pipeline stage's copy
    of a tied embedding has the embedding's name."""
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            yield _global_name(portable_name(name), chunk, tied), parameter


def _global_name(name: str, chunk: Any, tied: bool) -> str:
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    if found := re.search(r"decoder\.layers\.(\d+)\.", name):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        name = name.replace(found[0], f"decoder.layers.{number}.", 1)
    if found := re.search(r"local_experts\.(\d+)\.", name):
        here = chunk.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
        number = int(found[1]) + here * mpu.get_expert_model_parallel_rank()
        name = name.replace(found[0], f"local_experts.{number}.", 1)
    return name


def _group(name: str) -> Any:
    """The ranks that hold the other parts of a parameter."""
    experts = ".local_experts." in name
    return mpu.get_expert_tensor_parallel_group() if experts else mpu.get_tensor_model_parallel_group()


def _rules_for(model: list[Any], config: HfConfig) -> Iterator[tuple[str, torch.nn.Parameter, Rule]]:
    """This rank's parameters with their rules; refuses a model and a config.json that are not of one kind."""
    tp_size = mpu.get_tensor_model_parallel_world_size()
    if config.groups % tp_size:
        raise InputError(
            f"--tensor-model-parallel-size {tp_size} does not divide the model's {config.groups} key-value heads; use less"
        )
    table = dict(rules(config))
    here = list(local_parameters(model, config.tied))
    silent = dist.get_rank() != 0 or not sys.stderr.isatty()
    for name, parameter in tqdm(here, desc="Hugging Face weights", unit="tensor", leave=False, disable=silent):
        if name not in table:
            raise InputError(f"--hf-checkpoint: {config.architecture} has no counterpart of Megatron's {name}")
        yield name, parameter, table[name]


def checked_reader(folder: str) -> HfReader:
    """The tensors of a Hugging Face checkpoint, whose names and shapes are those of its config.json.

    Raises:
        InputError: they are not.
    """
    config, reader = load_config(folder), HfReader(folder)
    expected = {name: shape for _, rule in rules(config) for name, shape in zip(rule.hf, rule.shapes, strict=True)}
    reader.check(expected, config.tied)
    return reader


@torch.no_grad()
def load_hf(model: list[Any], folder: str) -> None:
    """Fill the model with a Hugging Face checkpoint; each rank reads only what it holds.

    Raises:
        InputError: the checkpoint is not whole, or of another kind or shape than the model.
    """
    reader, config = checked_reader(folder), load_config(folder)
    for name, parameter, rule in _rules_for(model, config):
        group = _group(name)
        fill_from_hf(reader, name, rule, parameter.detach(), group.rank(), group.size())


def fill_from_hf(
    reader: HfReader, name: str, rule: Rule, out: torch.Tensor, tp_rank: int = 0, tp_size: int = 1
) -> None:
    """Read a rank's part of the parameter ``name`` into ``out``.

    Raises:
        InputError: a tensor of it is not there, not of its shape or not finite, or ``out`` is of another shape.
    """
    padded = out.size(0) * tp_size if rule.vocab else None
    slices = [rule.part(index, tp_rank, tp_size, padded) for index in range(len(rule.hf))]
    sizes = [[s.stop - s.start for s in part] for part in slices]
    count = sum(math.prod(size) for size in sizes)
    if count != out.numel() and not (rule.vocab and count < out.numel()):
        raise InputError(f"{reader.folder}: {name} is {list(out.shape)} in the model, made of {sizes} in the files")
    places = rule.places(out, sizes[0][0])
    for tensor, shape, part, place in zip(rule.hf, rule.shapes, slices, places, strict=True):
        reader.read_into(place, tensor, shape, part)


@torch.no_grad()
def gather_hf(model: list[Any], config: HfConfig, to_stage_head: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole Hugging Face tensors of this rank's pipeline stage, one after the other, each on one rank of all.

    Every rank runs through it; tensor-parallel ranks send their part of a parameter to the first of them. Experts stay on
    the first rank that has them, or go on ``to_stage_head``: the stage's first rank, which then has all of the stage.
    """
    table = dict(rules(config)) if to_stage_head else {}
    for name, parameter, rule in _rules_for(model, config):
        if not _sends(name):
            continue
        whole = _whole(parameter, rule, _group(name))
        if whole is not None and to_stage_head and ".local_experts." in name:
            for owner, expert in enumerate(_all_experts(whole)):
                theirs = table[_expert_of(name, owner, config.experts)]
                yield from zip(theirs.hf, theirs.take_apart(expert), strict=True)
        elif whole is not None:
            yield from zip(rule.hf, rule.take_apart(whole), strict=True)


def _all_experts(mine: torch.Tensor) -> list[torch.Tensor]:
    """The expert at one place of every expert-parallel rank, on the first of them; nothing on the others."""
    group = mpu.get_expert_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(mine.contiguous(), parts, group=group, group_dst=0)
    return parts or []


def _expert_of(name: str, owner: int, experts: int) -> str:
    """The name of the first expert-parallel rank's expert, changed to that of the ``owner``'s at the same place."""
    here = experts // mpu.get_expert_model_parallel_world_size()
    return re.sub(
        r"local_experts\.(\d+)\.", lambda found: f"local_experts.{int(found[1]) % here + owner * here}.", name, count=1
    )


def stage_head() -> bool:
    """True on the rank that has its whole pipeline stage's tensors in ``gather_hf(..., to_stage_head=True)``."""
    ranks = (mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank(with_context_parallel=True))
    return not any(ranks)


def planned_hf(model: list[Any], config: HfConfig) -> list[Planned]:
    """What ``gather_hf`` will give this rank."""
    table = dict(rules(config))
    return [
        (hf, parameter.dtype, shape)
        for name, parameter in local_parameters(model, config.tied)
        if _sends(name) and _group(name).rank() == 0
        for hf, shape in zip(table[name].hf, table[name].shapes, strict=True)
    ]


def _sends(name: str) -> bool:
    """Whether this rank has a part in the parameter that goes out, and not a copy."""
    copy = name == "embedding.word_embeddings.weight" and not mpu.is_pipeline_first_stage()
    return not copy and _is_first_replica(name)


def _is_first_replica(name: str) -> bool:
    if ".local_experts." in name:
        return bool(mpu.get_expert_data_parallel_rank() == 0)
    return bool(mpu.get_data_parallel_rank(with_context_parallel=True) == 0)


def _whole(parameter: torch.nn.Parameter, rule: Rule, group: Any) -> torch.Tensor | None:
    """The whole parameter on the first rank of ``group``, None on the others."""
    mine = parameter.detach().contiguous()
    if rule.split is None or group.size() == 1:
        return mine if group.rank() == 0 else None
    parts = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(mine, parts, group=group, group_dst=0)
    if parts is None:
        return None
    if rule.kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(parts, rule.split)


def save_hf(model: list[Any], source: str, target: str, origin: str = "") -> None:
    """Write the model as a Hugging Face checkpoint; ``source`` is the one it began as (config.json, tokenizer), ``origin`` a
    sentence for its model card."""
    dtype = next(iter(unwrap_model(model)[0].parameters())).dtype
    config = load_config(source)
    write_hf(gather_hf(model, config), planned_hf(model, config), source, target, dtype, origin)


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    planned: list[Planned],
    source: str,
    target: str,
    dtype: torch.dtype,
    origin: str = "",
) -> None:
    """Write this rank's ``tensors``, as ``planned``, which with all ranks' are the model of ``source``, as a Hugging Face
    checkpoint.

    Whole or not at all: ``target`` appears when every rank has written its shards.
    """
    config, rank = load_config(source), dist.get_rank()
    with whole_or_not_at_all(Path(target), owner=rank == 0) as draft:
        dist.barrier()
        writer = HfWriter(draft, f"{rank:05d}", planned)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.flush()
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, (writer.where, writer.total))
        if rank == 0:
            where = {name: file for part, _ in written for name, file in part.items()}
            expected = {name for _, rule in rules(config) for name in rule.hf}
            assert where.keys() == expected, f"not written: {sorted(expected - where.keys())[:5]}"
            write_index(draft, where, sum(total for _, total in written))
            copy_companions(source, draft, str(dtype).removeprefix("torch."), origin)
    dist.barrier()
