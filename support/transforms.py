# SPDX-License-Identifier: Apache-2.0
"""A transform like those of fine-tuning: freezes everything, and adds low-rank adapters to some linear layers."""

import zlib
from typing import Any

import torch
from torch import nn

RANK = 4


class LowRank(nn.Module):
    """A linear layer of Megatron-Core's whose output is sharded over tensor-parallel ranks, plus ``x A^T B^T``.

    Deliberately a plain module: nothing of it knows of checkpoints. A and B are those of a whole model, whatever the layout.
    """

    def __init__(self, to_wrap: nn.Module, name: str) -> None:
        from megatron.core import parallel_state

        super().__init__()
        self.to_wrap = to_wrap
        weight: Any = to_wrap.weight
        experts = not getattr(weight, "allreduce", True)
        size = 1 if experts else parallel_state.get_tensor_model_parallel_world_size()
        rank = 0 if experts else parallel_state.get_tensor_model_parallel_rank()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole_a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
        whole_b = torch.randn(weight.shape[0] * size, RANK, generator=generator) * 0.1
        self.a = nn.Parameter(whole_a.to(weight.dtype))
        self.b = nn.Parameter(whole_b.chunk(size)[rank].clone().to(weight.dtype))
        self.b.tensor_model_parallel, self.b.partition_dim, self.b.partition_stride = size > 1, 0, 1  # pyright: ignore
        if experts:
            self.a.allreduce = self.b.allreduce = False  # pyright: ignore
        self.gathers = getattr(to_wrap, "sequence_parallel", False)
        self.cut = size > 1

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.tensor_parallel import mappings

        output, bias = self.to_wrap(x, *args, **kwargs)
        if self.gathers:
            x = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
        hidden = x @ self.a.t()
        if self.cut:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden)
        return output + hidden @ self.b.t(), bias


class FreezeAndAdd:
    """``wrapped``: the ends of the names of modules that get an adapter."""

    def __init__(self, *wrapped: str) -> None:
        self.wrapped = wrapped
        self.seen: list[str] = []

    def __call__(self, module: nn.Module, name: str) -> nn.Module:
        self.seen.append(name)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
        return LowRank(module, name) if name.endswith(self.wrapped) else module


def freeze_all_but_norms(chunk: nn.Module) -> nn.Module:
    """A transform of the chunk as a whole."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("norm" in name)
    return chunk


class FreezeBut:
    """Trains only the parameters below modules whose names end in one of ``trained``."""

    def __init__(self, *trained: str) -> None:
        self.trained = trained

    def __call__(self, module: nn.Module, name: str) -> nn.Module:
        kept = any(f"{name}.".find(f"{end}.") >= 0 for end in self.trained)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = kept
        return module
