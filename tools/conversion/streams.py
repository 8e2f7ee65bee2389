"""The tensors of a model on their way between two checkpoints, one parameter or one layer in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from conversion.common import Parameter, chunk_shape, parameters_of, share_of_this_rank, with_progress
from megatron_dapo.types import InputError
from megatron_dapo.weights.gather import checked_reader, fill_from_hf
from megatron_dapo.weights.hf_folder import load_config
from megatron_dapo.weights.hf_io import PiecewiseFile, Planned
from megatron_dapo.weights.mapping import HfConfig, Rule, rules


class StreamedSave(TorchDistSaveShardedStrategy):
    """Megatron's strategy for torch_dist checkpoints, without tensors in its state dict: a parameter is made of the Hugging
    Face checkpoint when it is written, and let go of. (torch's own writer keeps a tensor of every key it has written.)

    Every rank has the whole model's names and writes its share of the parameters to a file of its own.
    """

    def __init__(self, model: Any, folder: str) -> None:
        super().__init__()
        self.model, self.reader, self.rules = model, checked_reader(folder), dict(rules(load_config(folder)))

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the tensors and then, on rank 0, the metadata that makes a checkpoint of the files. Collective.

        Raises:
            InputError: on all ranks, what one of them has found in the Hugging Face checkpoint or run into while writing.
        """
        parameters = parameters_of(self.model, sharded_state_dict["model"])
        values = nested_values(sharded_state_dict)
        objects = [o for o in values if isinstance(o, ShardedObject) and is_main_replica(o.replica_id)]
        results = agreed(lambda: self._write(parameters, objects, Path(checkpoint_dir)))
        if dist.get_rank() == 0:
            items = [_tensor_item(piece, p.dtype) for p in parameters for piece in p.pieces]
            indices = [result.index for rank in results for result in rank]
            items += [WriteItem(index, WriteItemType.BYTE_IO) for index in indices if index.offset is None]
            _, metadata = create_default_global_save_plan([SavePlan(items)])
            writer = FileSystemWriter(checkpoint_dir)
            writer.set_up_storage_writer(True)
            writer.finish(metadata, results)
        dist.barrier()

    def _write(self, parameters: list[Parameter], objects: list[ShardedObject], folder: Path) -> list[WriteResult]:
        """This rank's file, of torch.save's archives one behind the other; where each of them lies in it."""
        name = f"__{dist.get_rank()}_0.distcp"
        found = []

        def add(index: MetadataIndex, value: Any) -> None:
            begin = file.tell()
            torch.save(value, file)
            length = file.tell() - begin
            found.append(WriteResult(index, length, _StorageInfo(name, begin, length)))

        with PiecewiseFile(str(folder / name), "wb") as file:
            for o in objects:
                add(MetadataIndex(o.unique_key), [o.data])
            for parameter in with_progress(share_of_this_rank(parameters), "Megatron checkpoint"):
                for piece, tensor in zip(parameter.pieces, self._read(parameter), strict=True):
                    add(MetadataIndex(piece.key, torch.Size(piece.global_offset)), tensor)
            os.fsync(file.fileno())
        return found

    def _read(self, parameter: Parameter) -> list[torch.Tensor]:
        if parameter.name not in self.rules:
            raise InputError(f"--hf-checkpoint {self.reader.folder}: no counterpart of Megatron's {parameter.name}")
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        fill_from_hf(self.reader, parameter.name, self.rules[parameter.name], whole)
        return parameter.memory_of_pieces(whole)


def agreed(work: Callable[[], Any]) -> list[Any]:
    """What ``work`` gives on every rank. Collective.

    Raises:
        InputError: on all ranks, where one of them has raised one or could not read or write a file.
    """
    mine, failure = None, None
    try:
        mine = work()
    except InputError as error:
        failure = str(error)
    except OSError as error:
        failure = f"{error.filename or 'writing'}: {error.strerror}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, failure))
    if failures := [failure for _, failure in everyone if failure]:
        raise InputError(failures[0])
    return [done for done, _ in everyone]


def _tensor_item(piece: ShardedTensor, dtype: torch.dtype) -> WriteItem:
    offset = torch.Size(piece.global_offset)
    chunk = ChunkStorageMetadata(offset, chunk_shape(piece))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(piece.global_shape))
    return WriteItem(MetadataIndex(piece.key, offset), WriteItemType.SHARD, tensor_data=data)


def hf_tensors(model: Any, path: str, config: HfConfig) -> tuple[list[Planned], Iterator[tuple[str, torch.Tensor]]]:
    """This rank's share of the Hugging Face tensors of the Megatron checkpoint ``path``: names, dtypes and shapes, and the
    tensors, a layer in memory at a time."""
    sharded = model.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata(path))
    apply_factories(sharded)
    share, table = share_of_this_rank(parameters_of(model, sharded)), dict(rules(config))
    planned = [
        (name, parameter.dtype, shape)
        for parameter in share
        for name, shape in zip(table[parameter.name].hf, table[parameter.name].shapes, strict=True)
    ]
    return planned, _hf_tensors(share, path, table)


def _hf_tensors(share: list[Parameter], path: str, table: dict[str, Rule]) -> Iterator[tuple[str, torch.Tensor]]:
    strategy = TorchDistLoadShardedStrategy(cache_metadata=True)
    for _, layer in groupby(
        with_progress(share, "Hugging Face checkpoint"), lambda parameter: parameter.name.split(".")[:3]
    ):
        read: list[tuple[Parameter, torch.Tensor]] = []
        wanted = {}
        for parameter in layer:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            read.append((parameter, whole))
            for number, memory in enumerate(parameter.memory_of_pieces(whole)):
                stacked = {"local_shape": tuple(memory.shape), "prepend_axis_num": 0}  # some layers of a stack, not all
                wanted[f"{parameter.name} {number}"] = replace(parameter.pieces[number], data=memory, **stacked)
        strategy.load(wanted, path, async_strategy="mcore")  # into that memory
        for parameter, whole in read:
            rule = table[parameter.name]
            yield from zip(rule.hf, rule.take_apart(whole), strict=True)
