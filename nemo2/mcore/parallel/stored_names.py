# SPDX-License-Identifier: Apache-2.0
"""The stored tensor, and the position in it, of each parameter in Megatron-Core's checkpoints.

Megatron-Core stacks layers into one tensor, and divides the gated feed-forward into its two halves. A fully sharded
model stores its parameters in the same way. `MegatronStrategy` can therefore read its checkpoints in any layout, and
the fully sharded model can read the checkpoints of `MegatronStrategy`.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from nemo2.mcore.parallel.sharded_state import added_keys, key_by_layer, leaves, sharded_state
from nemo2.mcore.parallel.transform import full_parameter_names


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A range of a parameter's rows, ``start`` to ``stop``, which is stored at ``offset`` in the tensor ``key``.

    The stored tensor may have further leading dimensions, over which Megatron-Core stacks layers and experts.
    """

    key: str
    start: int
    stop: int
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    dims: int
    """Dimensions of the parameter; the stored tensor may have more."""
    padded: bool = False
    """Whether the rows are a vocabulary, padded to a number that the tensor-parallel size divides."""


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """The stored form of a chunk, read before its parameters are sharded."""

    stored: dict[str, list[StoredRows]]
    """The stored position of each parameter and persistent buffer, by its name in the chunk."""
    objects: dict[str, Any]
    """The extra states of layers, which Megatron-Core stores beside tensors and requires on load."""
    added: frozenset[str]
    """The keys of the tensors that a transform has added."""
    full_names: dict[str, str]
    """The names in the whole model, by the names in the chunk."""
    trained: frozenset[str]
    """The names in the chunk of the trainable parameters."""


def stored_chunk(core: nn.Module) -> StoredChunk:
    return StoredChunk(
        stored=stored_names(core),
        objects=stored_objects(core),
        added=added_keys(core),
        full_names=full_parameter_names(core),
        trained=frozenset(name for name, parameter in core.named_parameters() if parameter.requires_grad),
    )


def stored_names(core: nn.Module) -> dict[str, list[StoredRows]]:
    """The stored rows of each parameter and persistent buffer of ``core``, by its name. Call this before the parameters
    are sharded.

    Parameters that Megatron-Core stores in a form other than rows, or doesn't store itself, keep their own names.
    """
    by_tensor: dict[Any, list[StoredRows]] = {}
    for entry in leaves(sharded_state(core), ShardedTensor, ShardedTensorFactory):
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        rows = [_rows(part, entry.data) for part in leaves(parts, ShardedTensor)]
        if rows and all(row is not None for row in rows):
            by_tensor[_place(entry.data)] = cast(list[StoredRows], rows)
    state = core.state_dict(keep_vars=True)
    return {
        name: by_tensor.get(_place(value)) or [_own_name(name, value)]
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def names_of(stored: dict[str, list[StoredRows]], keys: set[str]) -> list[str]:
    """The names of the parameters that have rows in the tensors ``keys``."""
    return [name for name, rows in stored.items() if any(row.key in keys for row in rows)]


def rows_by_layer(rows: list[StoredRows]) -> list[StoredRows]:
    """The same rows if each layer is stored separately, as in a checkpoint of a part of a model."""
    separate = []
    for row in rows:
        key = key_by_layer(row.key, row.offset, len(row.global_shape) > row.dims)
        stacked = int(key != row.key)
        separate.append(replace(row, key=key, offset=row.offset[stacked:], global_shape=row.global_shape[stacked:]))
    return separate


def stored_objects(core: nn.Module) -> dict[str, Any]:
    # A list with one element, because Megatron-Core keeps several parts of an object under one name.
    return {entry.unique_key: [entry.data] for entry in leaves(sharded_state(core), ShardedObject)}


def _own_name(name: str, value: Tensor) -> StoredRows:
    rows = value.shape[0] if value.dim() else 1
    return StoredRows(
        key=f"module.{name}",
        start=0,
        stop=rows,
        offset=(0,) * value.dim(),
        global_shape=tuple(value.shape),
        dims=value.dim(),
    )


def _rows(part: ShardedTensor, whole: Tensor) -> StoredRows | None:
    """The range of a parameter's rows that a part stored by Megatron-Core covers. None: the part isn't a range of
    rows."""
    data = part.data
    if data is None or data.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    if data.shape[1:] != whole.shape[1:] or data.stride() != whole.stride() or not whole.is_contiguous():
        return None
    first = int(data.storage_offset()) - int(whole.storage_offset())
    start = first // int(whole.stride(0)) if whole.dim() else 0
    return StoredRows(
        key=part.key,
        start=start,
        stop=start + (data.shape[0] if data.dim() else 1),
        offset=tuple(part.global_offset),
        global_shape=tuple(part.global_shape),
        dims=data.dim(),
        padded=part.allow_shape_mismatch,
    )


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape
