# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's fully sharded data parallelism around a chunk, on GPUs and on CPUs."""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core import __version__ as _installed
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import nn
from torch.utils.hooks import RemovableHandle

from nemo2.base import ranks
from nemo2.base.backend import get_backend
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_fields
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.parallel.stored_names import stored_chunk

_SHARDED = "sharded_by_megatron_fsdp"
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
"""The sharded tensors: the optimizer's state (ZeRO-1); also gradients (ZeRO-2); also parameters (ZeRO-3)."""


class MegatronFSDPChunk(FullyShardedDataParallel):
    """Megatron-Core's wrapper, with this process's device for its tensors."""

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
    ) -> None:
        _broadcast_parameters(module)
        if get_backend().process_group_backend != "nccl":  # no other can multiply while it sums
            ddp_config = copy.copy(ddp_config)
            ddp_config.gradient_reduce_div_fusion = False
        core = cast(nn.Module, module.module) if isinstance(module, Float16Module) else module
        described = stored_chunk(core)
        with _no_hooks_on_frozen_parameters(module), told_of_split_rows():
            super().__init__(
                config=config,
                ddp_config=ddp_config,
                module=module,
                disable_bucketing=disable_bucketing,
                device=get_backend().device,
            )
        self.__dict__["core"] = core
        """The chunk itself. It is not registered as a submodule, because its parameters would then appear twice."""
        self.described = described
        self._first_rows: dict[str, int] | None = None
        # Set on the instance, where Megatron-Core sets its own, which doesn't support parameters that are already
        # sharded.
        self.broadcast_params = _no_broadcast

    def main_parameters(self) -> dict[str, tuple[nn.Parameter, int]]:
        """The optimizer's main parameter of each parameter, by its name in the chunk, with the index of its first row.

        Every rank must make the first call, in which the ranks exchange the number of rows that each of them holds.
        """
        held = {
            name if name in self.described.stored else name.removeprefix("module."): parameter
            for name, parameter in cast(Any, self.param_and_grad_buffer).optimizer_named_parameters
        }
        if self._first_rows is None:
            self._first_rows = _first_rows(held)
        return {name: (parameter, self._first_rows[name]) for name, parameter in held.items()}

    def install_main_parameters(self) -> None:
        """Copy `main_parameters` into the model's parameters, in their dtype and on all ranks."""
        wrapper: Any = self
        wrapper.param_and_grad_buffer.copy_main_weights_to_model_weights()
        wrapper.module.synchronize_param_gather()  # otherwise what was gathered earlier counts as gathered now
        wrapper.start_param_sync()


def refuse_second_sharding(core: nn.Module, ddp_config: DistributedDataParallelConfig) -> None:
    """Check that the parameters of ``core``, a chunk without wrappers, weren't sharded before, and note that they are now.

    Raises:
        ConfigError: they were, in an earlier fit, which has freed their memory.
    """
    if ddp_config.data_parallel_sharding_strategy != "optim_grads_params":
        return
    if _SHARDED in core.__dict__:
        raise ConfigError(
            "strategy.fsdp='megatron': Megatron-FSDP sharded this model in an earlier fit, and can't shard it again. Create "
            "the model anew and load a checkpoint."
        )
    core.__dict__[_SHARDED] = True


def _first_rows(parameters: dict[str, Any]) -> dict[str, int]:
    rows = {name: parameter.to_local().shape[0] if parameter.dim() else 0 for name, parameter in parameters.items()}
    first: dict[str, int] = {}
    meshes = {id(parameter.device_mesh): parameter.device_mesh for parameter in parameters.values()}
    for key, mesh in meshes.items():
        group = mesh.get_group("dp_cp")
        mine = {name: rows[name] for name, parameter in parameters.items() if id(parameter.device_mesh) == key}
        everyone = ranks.gather(mine, group=group)
        for name in mine:
            first[name] = sum(other[name] for other in everyone[: group.rank()])
    return first


def _broadcast_parameters(module: nn.Module) -> None:
    """Broadcast the parameters of replica 0 to every replica before they are sharded."""
    dense: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts: Any = parallel_state.get_expert_data_parallel_group()
    for parameter in module.parameters():
        group = dense if getattr(parameter, "allreduce", True) else experts
        torch.distributed.broadcast(parameter.data, src=torch.distributed.get_global_rank(group, 0), group=group)


@contextmanager
def told_of_split_rows() -> Iterator[None]:
    """A context in which Megatron-FSDP shards a model.

    Raises:
        ConfigError: its buffers split a parameter that has fewer numbers than the longest row beside it, as an adapter of a
            small rank has, inside a row, and it ends in the shape of the part. Which ones depends on the order in the buffer.
    """
    try:
        yield
    except RuntimeError as error:
        if "is invalid for input of size" not in str(error):
            raise
        raise ConfigError(
            f"strategy.fsdp='megatron' can't split a small parameter between ranks ({error}). If it is an adapter's, raise the "
            "method's dim. Otherwise use FSDP2Strategy, or set strategy.fsdp=None to shard only the optimizer state."
        ) from error


@contextmanager
def _no_hooks_on_frozen_parameters(module: nn.Module) -> Iterator[None]:
    """A context without gradient hooks on frozen parameters. Megatron-FSDP registers such a hook on every parameter,
    and torch rejects it for frozen ones."""
    name = "register_post_accumulate_grad_hook"
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        setattr(parameter, name, lambda hook: RemovableHandle(OrderedDict()))
    try:
        yield
    finally:
        for parameter in frozen:
            delattr(parameter, name)


def _no_broadcast() -> None:
    """Does nothing: `_broadcast_parameters` has broadcast the parameters."""


def unshared(layout: Layout, world_size: int, *, has_experts: bool, instances: int = 1) -> str | None:
    """Why Megatron-FSDP can't shard over the ranks of this layout. None: it can. ``layout`` fits the world.

    If one rank alone holds parameters, 0.16.1's gradient buffer is its own reduced shard and is added to itself
    (``GradReducePipeline`` in ``param_and_grad_buffer.py``), so gradients count twice. 0.19.2 is correct for a model
    that is all on one rank. Experts that one rank alone holds, however, get 60 to 92 % of their gradients there
    (measured, two micro-batches). Where an instance is one rank, 0.19.2 scales the accumulated gradient again in each
    micro-batch.

    Args:
        instances: ``num_distributed_optimizer_instances``, between which parameters are replicated.
    """
    ranks = f"on {counted(world_size, 'rank')} ({layout.describe()})"
    model_parallel = layout.tp * layout.pp
    if world_size // model_parallel == 1:
        return (
            f"{ranks}: this layout has one data-parallel rank, so Megatron-FSDP has nothing to shard and may count "
            f"gradients twice. Leave strategy.fsdp unset, or run on {2 * model_parallel} ranks (or another multiple "
            f"of {model_parallel})."
        )
    sizes = (layout.expert_tensor_size, layout.ep, layout.pp)
    expert_parallel = math.prod(sizes)
    if instances > 1 and instances in (world_size // model_parallel, has_experts and world_size // expert_parallel):
        return (
            f"{ranks}: strategy.num_distributed_optimizer_instances={instances} leaves an instance one rank, so Megatron-FSDP "
            "has nothing to shard there and would compute wrong gradients. Set num_distributed_optimizer_instances=1."
        )
    if has_experts and world_size // expert_parallel == 1:
        field, size = ("expert_model", layout.ep) if layout.ep > 1 else ("expert_tensor", layout.expert_tensor_size)
        smaller = next(size // factor for factor in range(2, size + 1) if size % factor == 0)
        return (
            f"{ranks}: expert_tensor_parallel_size * expert_model_parallel_size * pipeline_model_parallel_size = "
            f"{' * '.join(map(str, sizes))} = {expert_parallel} leaves one rank per expert. Megatron-FSDP has nothing "
            f"to shard there and would compute wrong gradients for the experts. Set "
            f"strategy.{field}_parallel_size={smaller}, run on {2 * expert_parallel} ranks, or leave strategy.fsdp "
            "unset."
        )
    return None


def always_overlapped(sharding_strategy: str) -> tuple[str, ...]:
    """The fields of the gradient buffers that Megatron-FSDP switches on with this sharding, whatever their values
    were."""
    return {
        "optim_grads": ("overlap_grad_reduce",),
        "optim_grads_params": ("overlap_grad_reduce", "overlap_param_gather"),
    }.get(sharding_strategy, ())


def not_overlapped(sharding_strategy: str, version: str = _installed) -> str | None:
    """Why Megatron-FSDP of this version of Megatron-Core may not overlap the reduction of gradients. None: it may.

    In 0.16.1 ``GradReducePipeline._bucket_group_gradient_reduce`` adds the reduced shard to the gradient buffer that
    was reduced. This is correct only for a buffer that holds shards. For a buffer of whole gradients, norms were 1.5 to
    1.6 times too large (measured on two ranks over four steps).
    """
    if sharding_strategy != "optim" or Version(version) >= Version("0.17"):
        return None
    return (
        f"Megatron-FSDP of Megatron-Core {version} counts a rank's own gradients twice if it overlaps the reduction "
        "of gradients that aren't sharded"
    )


def turn_on(ddp_config: DistributedDataParallelConfig, *, why: str) -> None:
    """Switch Megatron-FSDP on. It shards everything unless the user has selected what to shard.

    Raises:
        ConfigError: settings that Megatron-FSDP doesn't support.
    """
    explicit = explicit_fields(ddp_config)
    if "data_parallel_sharding_strategy" not in explicit:
        adjust(ddp_config, "data_parallel_sharding_strategy", "optim_grads_params", why=why)
    problems = []
    if ddp_config.data_parallel_sharding_strategy not in STRATEGIES:
        problems.append(
            f"strategy.ddp_config.data_parallel_sharding_strategy={ddp_config.data_parallel_sharding_strategy!r}: "
            f"with strategy.fsdp='megatron' this field must be one of {', '.join(STRATEGIES)}. Set one of these, or "
            "leave strategy.fsdp unset to shard nothing."
        )
    if "use_distributed_optimizer" in explicit and not ddp_config.use_distributed_optimizer:
        problems.append(
            "strategy.ddp_config.use_distributed_optimizer=False with strategy.fsdp='megatron': Megatron-FSDP "
            "requires the distributed optimizer. Set use_distributed_optimizer=True, or leave it unset."
        )
    settings = {"use_megatron_fsdp": True, "use_distributed_optimizer": True}
    # Megatron-Core switches these on itself when it wraps the model.
    settings |= dict.fromkeys(always_overlapped(ddp_config.data_parallel_sharding_strategy), True)
    problems += [
        f"strategy.ddp_config.{name}=False with strategy.fsdp='megatron': Megatron-FSDP always overlaps this "
        f"communication when data_parallel_sharding_strategy is {ddp_config.data_parallel_sharding_strategy!r}. Leave "
        f"{name} unset."
        for name in settings
        if name.startswith("overlap_") and name in explicit and not getattr(ddp_config, name)
    ]
    unsound = not_overlapped(ddp_config.data_parallel_sharding_strategy)
    if unsound and ddp_config.overlap_grad_reduce:
        problems.append(
            "strategy.ddp_config.overlap_grad_reduce=True with strategy.fsdp='megatron' and "
            f"data_parallel_sharding_strategy='optim': {unsound}. Set overlap_grad_reduce=False and "
            "overlap_param_gather=False, set data_parallel_sharding_strategy='optim_grads', or install "
            "megatron-core>=0.17."
        )
    if problems:
        raise ConfigError(" ".join(problems))
    for name, value in settings.items():
        adjust(ddp_config, name, value, why=why)
