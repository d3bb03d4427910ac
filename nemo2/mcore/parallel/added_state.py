# SPDX-License-Identifier: Apache-2.0
"""How the parameters that a transform has added to a chunk are stored (`nemo2.mcore.parallel.sharded_state`)."""

from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def added(leaf: Any, built: dict[int, Any]) -> Any:
    """How the parameters that a transform has added are stored. ``built``: the leaves of the model before the
    transform, by their tensors' ids.

    If a parameter's ``rows_like`` is a weight of the model, its rows are distributed over tensor-parallel ranks like
    that weight's. In a fused layer (gate and up projection, the projections of a Mamba mixer) these are not consecutive
    blocks.
    """
    weight = getattr(leaf.data, "rows_like", None)
    pattern = None if weight is None else built.get(id(weight))
    if isinstance(pattern, ShardedTensorFactory):
        return _rows_like(leaf, pattern)
    return _cut_as_the_parameter(leaf)


def _rows_like(leaf: Any, pattern: ShardedTensorFactory) -> ShardedTensorFactory:
    pieces = [value for value in nested_values({"": pattern.build()}) if isinstance(value, ShardedTensor)]

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any = None) -> Any:
        parts, start = [], 0
        for piece in pieces:
            rows, axis = piece.local_shape[0], piece.prepend_axis_num
            mine = tensor[start : start + rows]
            start += rows
            parts.append(
                replace(
                    piece,
                    key=key + piece.key.removeprefix(pattern.key),
                    data=mine,
                    dtype=mine.dtype,
                    local_shape=tuple(mine.shape),
                    global_shape=(*piece.global_shape[: axis + 1], *mine.shape[1:]),
                    global_offset=(*piece.global_offset[: axis + 1], *(0 for _ in mine.shape[1:])),
                    axis_fragmentations=(*(piece.axis_fragmentations or ())[: axis + 1], *(1 for _ in mine.shape[1:])),
                    replica_id=replica_id,
                )
            )
        return parts

    def merge(tensors: Any) -> Any:
        return torch.cat(tensors)

    return ShardedTensorFactory(leaf.key, leaf.data, build, merge, pattern.replica_id)


def _cut_as_the_parameter(leaf: Any) -> Any:
    """Describe a parameter's sharding by its own attributes. Megatron-Core treats the tensors of a user's module as
    equal on all tensor-parallel ranks."""
    parameter: Any = getattr(leaf, "data", None)
    if not isinstance(leaf, ShardedTensor) or not isinstance(leaf.replica_id, tuple):
        return leaf
    if getattr(parameter, "allreduce", True):
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    else:
        size = parallel_state.get_expert_tensor_parallel_world_size() or 1
        rank = parallel_state.get_expert_tensor_parallel_rank() or 0
        # Tensor-parallel ranks hold different experts. The other ranks of the same expert hold copies.
        leaf = replace(leaf, replica_id=_at(cast(Any, leaf.replica_id), 1, rank))
    dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    axis = leaf.prepend_axis_num + dim
    fragments = leaf.axis_fragmentations
    if dim < 0 or size == 1 or fragments is None or fragments[axis] != 1:
        return leaf
    length = leaf.global_shape[axis]
    return replace(
        leaf,
        global_shape=_at(leaf.global_shape, axis, length * size),
        global_offset=_at(leaf.global_offset, axis, length * rank),
        axis_fragmentations=_at(fragments, axis, size),
        replica_id=_at(cast(Any, leaf.replica_id), 1, 0),  # (pipeline, tensor, data)
    )


def _at(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
