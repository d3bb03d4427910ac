# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a model over many ranks, and the trainable ones among them."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, cast

import torch
from megatron.core import parallel_state
from torch import nn

from nemo2.base.backend import get_backend


class ParameterCounts(NamedTuple):
    """The parameters of the whole model, each counted once."""

    total: int
    trained: int

    def __str__(self) -> str:
        share = ", all of them trained" if self.trained == self.total else f", {self.trained:,} of them trained"
        return f"{self.total:,} parameters{share}"


def count_parameters(chunks: Iterable[nn.Module]) -> Optional[ParameterCounts]:
    """Count the parameters of all pipeline-, tensor- and expert-parallel ranks. Every rank must call it. Without process
    groups there is one.

    Args:
        chunks: This rank's chunks, before parameters are sharded over data-parallel ranks.

    Returns:
        The counts. None for a model on meta tensors, whose other ranks don't exist.
    """
    alone = not parallel_state.model_parallel_is_initialized()
    first = {"dense": alone or parallel_state.get_tensor_model_parallel_rank() == 0}
    first["experts"] = alone or parallel_state.get_expert_tensor_parallel_rank() == 0
    counts = {kind: torch.zeros(2, dtype=torch.int64) for kind in first}
    for parameter in (one for chunk in chunks for one in chunk.parameters()):
        if parameter.is_meta:
            return None
        kind = "dense" if getattr(parameter, "allreduce", True) else "experts"
        counted_elsewhere = not getattr(parameter, "tensor_model_parallel", False) and not first[kind]
        # The output layer of a tied embedding is a copy of the embedding on another pipeline stage.
        if not counted_elsewhere and not getattr(parameter, "shared", False):
            counts[kind] += torch.tensor([parameter.numel(), parameter.numel() * parameter.requires_grad])
    if alone:
        return ParameterCounts(*cast(list[int], sum(counts.values()).tolist()))  # pyright: ignore[reportAttributeAccessIssue]
    groups: dict[str, Any] = {
        "dense": parallel_state.get_model_parallel_group(),
        "experts": parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
    }
    total = torch.zeros(2, dtype=torch.int64)
    for kind, count in counts.items():
        count = count.to(get_backend().device)
        torch.distributed.all_reduce(count, group=groups[kind])
        total += count.cpu()
    return ParameterCounts(*cast(list[int], total.tolist()))
