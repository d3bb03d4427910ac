# SPDX-License-Identifier: Apache-2.0
"""Tensors that concatenate several parts, as the first projections of Mamba's mixers and of linear attention do."""

import dataclasses
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def stored_in_sections(tensor: ShardedTensor, sizes: dict[str, int]) -> ShardedTensorFactory:
    """A tensor whose parts are saved separately, each sharded over the ranks, under keys that end in the parts' names."""
    bare = tensor.without_data()

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        whole = dataclasses.replace(
            bare, key=key, data=data, dtype=data.dtype, replica_id=replica_id, flattened_range=flattened_range
        )
        parts, start = [], 0
        for name, size in sizes.items():
            for part in whole.narrow(0, start, size):
                part.key = f"{key}.{name}"
                parts.append(part)
            start += size
        return parts

    def merge(parts: Any) -> Tensor:
        return torch.cat(list(parts))

    assert tensor.data is not None
    return ShardedTensorFactory(tensor.key, tensor.data, build, merge, tensor.replica_id)
