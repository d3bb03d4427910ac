# SPDX-License-Identifier: Apache-2.0
"""Writes and reads parts of tensors by name and position, through torch.distributed.checkpoint.

A `Shard` maps a local tensor to a part of a stored tensor. A stored tensor may be written from shards of one shape and
read into shards of another, so a checkpoint doesn't depend on the number of ranks. Shards that several ranks hold are
written once.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nemo2.base.names import listed
from nemo2.checkpoint.reading import Agree, DirectReader
from nemo2.mcore.parallel.stored_names import StoredRows


@dataclass(frozen=True, kw_only=True)
class Shard:
    """``tensor`` is the part at ``offset`` of the stored tensor ``key``, whose shape is ``global_shape``. Reading
    writes into ``tensor``.

    All three shapes have the same number of dimensions. ``padded``: see `StoredRows`.
    """

    key: str
    tensor: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    padded: bool = False

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.shape)


def stored_shards(
    stored: list[StoredRows], value: Tensor, *, prefix: str = "", first_row: int | None = None
) -> list[Shard]:
    """This rank's shards of a parameter, or of a tensor of its shape such as its momentum, each with its stored
    position.

    Args:
        stored: The stored form of the parameter.
        value: A DTensor, or a plain tensor that is equal on all ranks.
        prefix: The prefix of the stored names.
        first_row: The first row of the parameter that ``value``, or its local tensor, holds. None: the DTensor's own.
    """
    value = value.detach()
    local = value.to_local() if isinstance(value, DTensor) else value
    shape, offset = tuple(local.shape), (0,) * local.dim()
    if first_row is not None:
        offset = (first_row, *offset[1:])
    elif isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if not shape:
        return [Shard(key=prefix + row.key, tensor=local, offset=(), global_shape=()) for row in stored]
    if 0 in shape:
        return []
    shards = []
    first, last = offset[0], offset[0] + shape[0]
    for row in stored:
        start, stop = max(first, row.start), min(last, row.stop)
        if start >= stop:
            continue
        stacked = len(row.offset) - len(shape)
        place = [begin + at for begin, at in zip(row.offset[stacked:], offset, strict=True)]
        place[0] = row.offset[stacked] + start - row.start
        shards.append(
            Shard(
                key=prefix + row.key,
                tensor=local[start - first : stop - first][(None,) * stacked],
                offset=(*row.offset[:stacked], *place),
                global_shape=row.global_shape,
                padded=row.padded,
            )
        )
    return shards


def padded_to(shards: Sequence[Shard], rows: int) -> list[Shard]:
    """The requests for reading ``shards`` from a checkpoint whose padded tensors have ``rows`` rows. Further rows of
    the shards become zero, as in Megatron-Core."""
    requests = []
    for shard in shards:
        if shard.padded and shard.global_shape[0] != rows:
            there = max(0, min(len(shard.tensor), rows - shard.offset[0]))
            shard.tensor[there:].zero_()
            shape = (rows, *shard.global_shape[1:])
            requests += [replace(shard, tensor=shard.tensor[:there], global_shape=shape)] if there else []
        else:
            requests.append(shard)
    return requests


def save_shards(
    shards: Sequence[Shard], directory: os.PathLike | str, objects: Mapping[str, Any] | None = None
) -> None:
    """Write the shards of all ranks into ``directory``. Every rank must call it.

    Args:
        shards: This rank's shards.
        directory: An existing directory, empty except for files of other names.
        objects: Further objects by name. An object that several ranks hold under one name is written once.
    """
    # One file per rank, because small checkpoints lose more than several threads gain.
    writer = _Writer(directory, single_file_per_rank=True, sync_files=False)
    save({}, storage_writer=writer, planner=_SavePlanner(shards, objects or {}))


def load_shards(shards: Sequence[Shard], directory: os.PathLike | str, agree: Agree | None = None) -> None:
    """Read ``directory`` into the shards' tensors, in place. Every rank calls it. ``agree``: see `DirectReader`.

    Raises:
        CheckpointException: keys are missing, or have other shapes. The message lists all of them.
    """
    with torch.no_grad():
        load({}, storage_reader=DirectReader(directory, agree), planner=_LoadPlanner(shards))


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # Torch's metadata contains the directory as a path object. That is the temporary directory, not the final one.
        return StorageMeta(save_id=self.save_id)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, shards: Sequence[Shard], objects: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = {_index(shard): shard for shard in shards}
        self.objects = objects

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = {}, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=shard.chunk,
                    properties=TensorProperties.create_from_tensor(shard.tensor),
                    size=torch.Size(shard.global_shape),
                ),
            )
            for index, shard in self.shards.items()
        ]
        items += [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self.objects]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self.objects:
            return self.objects[index.fqn]
        # A view is written without the rest of its storage.
        return self.shards[_without_hint(index)].tensor.contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = {_index(shard): shard for shard in shards}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = {}, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        problems: list[str] = []
        for shard in self.shards.values():
            entry = stored.get(shard.key)
            if not isinstance(entry, TensorStorageMetadata):
                problems.append(f"the checkpoint has no {shard.key}")
            elif tuple(entry.size) != shard.global_shape:
                problems.append(
                    f"{shard.key} has shape {tuple(entry.size)} in the checkpoint and {shard.global_shape} in this "
                    "model"
                )
            else:
                items += create_read_items_for_chunk_list(shard.key, entry, [shard.chunk])
        if problems:
            raise ValueError(listed(problems, 5, separator="; "))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.shards[_without_hint(index)].tensor


def _index(shard: Shard) -> MetadataIndex:
    return MetadataIndex(shard.key, torch.Size(shard.offset))


def _without_hint(index: MetadataIndex) -> MetadataIndex:
    return MetadataIndex(index.fqn, index.offset)
