# SPDX-License-Identifier: Apache-2.0
"""A model chunk whose parameters torch shards, with the interface that Megatron-Core's schedules expect of a
data-parallel wrapper."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class ShardedChunk(_BaseDataParallel):
    """Provide the schedule with a chunk whose gradients torch reduces itself, during the backward.

    The gradients are the mean over the sharding ranks, in ``.grad`` of the sharded parameters.

    Args:
        config: The model's configuration.
        module: The sharded chunk.
        num_shards: The number of ranks that gradients are averaged over.
        whole: Placeholders without memory for parameters that no longer know their shapes, with the shapes before
            sharding, by the names in ``module``. None: the parameters know their shapes.
        shard_group: The ranks over which gradients in plain tensors are sharded. None: gradients are DTensors.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: nn.Module,
        *,
        num_shards: int,
        whole: dict[str, nn.Parameter] | None = None,
        shard_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config=config, module=module)
        self.num_shards = num_shards
        # With tensor-parallel groups Megatron-Core reads this to find out whether Megatron-FSDP reduces gradients.
        self.ddp_config = DistributedDataParallelConfig()
        # Not registered as submodules, because torch would list their tensors among the parameters.
        self.__dict__["whole"], self.__dict__["shard_group"] = whole, shard_group
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        root = next((part for part in module.modules() if isinstance(part, FullyShardedDataParallel)), None)
        if root is not None and root.cpu_offload.offload_params:
            root.register_forward_pre_hook(self._set_gradients_aside)

    def _set_gradients_aside(self, *_: Any) -> None:
        """Sum the gradients of the micro-batches so far: with offloaded parameters FSDP's backward replaces a gradient and
        doesn't add to it."""
        for parameter in self.parameters() if torch.is_grad_enabled() else ():
            if (gradient := parameter.grad) is not None:
                total = self._sums.get(parameter)
                self._sums[parameter] = gradient.clone() if total is None else total.add_(gradient)
                parameter.grad = None

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Add the gradients that were set aside. torch waits for its reductions at the end of each backward."""
        for parameter, total in self._sums.items():
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
        self._sums.clear()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Scale the gradients by ``scaling_factor``, which Megatron-Core computes for gradients that are sums.

        The factor is one over the number of tokens in the global batch. torch's gradients are means over the sharding
        ranks, so they are also multiplied by the number of these ranks.
        """
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor * self.num_shards)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients that were set aside. There is no buffer, and the optimizer clears ``.grad``."""
        self._sums.clear()

    def broadcast_params(self) -> None:
        """Does nothing: no two ranks hold the same shard."""


def meta_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter without its memory, with its shape and the attributes that Megatron-Core reads."""
    parameters = {}
    for name, parameter in module.named_parameters():
        parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        parameters[name].__dict__.update(parameter.__dict__)
    return parameters


def convert_masters_to_fp32(module: nn.Module, *, frozen_too: bool) -> None:
    """Convert parameters to fp32, the dtype in which the optimizer updates them. The forward uses copies in the
    precision's dtype.

    The values don't change: a model built in 16 bits starts where Megatron-Core's fp32 copies start. Frozen parameters
    keep their dtype, unless ``frozen_too``.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point() and (frozen_too or parameter.requires_grad):
            parameter.data = parameter.data.float()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated layers, whose parameters are gathered only for their own forward and backward.

    Hugging Face models name them (``_no_split_modules``). In Megatron-Core they are its layers, and elsewhere the items
    of the outermost module lists. All other parameters are gathered with the root.
    """
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    named = {name for part in module.modules() for name in (getattr(part, "_no_split_modules", None) or ()) if name}
    blocks: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        for child in part.children():
            if isinstance(child, (TransformerLayer, MambaLayer)) or type(child).__name__ in named:
                blocks.append(child)
            elif isinstance(child, nn.ModuleList) and not _holds(child, named, TransformerLayer, MambaLayer):
                blocks.extend(item for item in child if any(True for _ in item.parameters()))
            else:
                visit(child)

    visit(module)
    return blocks


def _holds(parent: nn.Module, names: set[str], *kinds: type) -> bool:
    return any(isinstance(part, kinds) or type(part).__name__ in names for part in parent.modules())


def sharding_mesh(tensor_parallel_size: int, device_type: str) -> Any:
    """The ranks as a mesh of ``shard`` x ``tp``.

    Parameters are sharded over all data- and context-parallel ranks (``shard``). Tensors are sharded over neighboring
    ranks (``tp``). Megatron-Core numbers ranks in the same order.
    """
    from torch.distributed.device_mesh import init_device_mesh

    world = torch.distributed.get_world_size()
    shape = (world // tensor_parallel_size, tensor_parallel_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("shard", "tp"))
