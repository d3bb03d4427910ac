# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model in training, by their full names, and the part of each gradient that a rank owns.

Only this module knows where a strategy keeps chunks, where Megatron-Core keeps gradients (in buffers, of which the
distributed optimizer leaves each data-parallel rank its part), and which rank counts a replicated parameter.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo2.base import ranks
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.mcore.parallel.transform import full_parameter_names


def chunks_of(trainer: Any) -> list[nn.Module]:
    """This rank's chunks without wrappers. If the strategy has none, the LightningModule itself."""
    parallel = getattr(trainer.strategy, "megatron_parallel", None)
    return [trainer.lightning_module] if parallel is None else list(parallel.unwrapped)


def named_parameters(trainer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters by their full names, in which layers have the numbers of the whole model. Shared
    parameters appear once."""
    # The names from before sharding: a state from FullyShardedDataParallel gathers all parameters.
    stored = getattr(getattr(trainer.strategy, "form", None), "chunks", None)
    for index, chunk in enumerate(chunks_of(trainer)):
        full = full_parameter_names(chunk) if stored is None else stored[index].full_names
        for name, parameter in chunk.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "")
            yield full.get(name, name), parameter


def belongs_to(name: str, module: str) -> bool:
    """Whether a parameter's full name is that of ``module`` or below it. Both may begin with ``module.``. The norm that
    Transformer Engine fuses with a linear layer has the name of the norm in plain layers, and isn't below the linear layer."""
    name, module = name.removeprefix("module."), module.removeprefix("module.")
    if name != module and "layer_norm_" in name:
        name = module_of_key(name)
    return name == module or name.startswith(f"{module}.")


def refuse_unknown_modules(trainer: Any, modules: list[str], *, of: str) -> None:
    """Check that modules exist. Every rank must call it.

    Raises:
        ConfigError: no rank has a parameter in one of the modules.
    """
    gathered = ranks.gather([name for name, _ in named_parameters(trainer)])
    refuse_modules_outside({name for names in gathered for name in names}, modules, of=of)


def refuse_modules_outside(names: Collection[str], modules: Iterable[str], *, of: str) -> None:
    """Check that modules are those with these full ``names``, or hold them.

    Raises:
        ConfigError: one isn't.
    """
    for module in modules:
        if not any(belongs_to(name, module) for name in names):
            raise ConfigError(
                f"{of}: the model has no module {module!r} with parameters{did_you_mean(module, with_parents(names))}"
            )


def with_parents(names: Collection[str]) -> set[str]:
    """The full names, and those of the modules that hold them."""
    return {".".join(parts[:end]) for parts in (name.split(".") for name in names) for end in range(1, len(parts) + 1)}


@dataclass
class Owned:
    """The part of a gradient that this rank counts. If several ranks hold the same part, only one of them counts it."""

    gradient: Optional[Tensor]
    """The flat gradient. None: another rank counts it, or there is none."""
    whole: Optional[Tensor]
    """The storage of this rank's gradient. With the distributed optimizer its other parts are not reduced. None:
    there is none."""


def owned_gradients(trainer: Any) -> Iterator[tuple[str, nn.Parameter, Owned]]:
    """This rank's part of each gradient, after its reduction and before the optimizer's step."""
    shards = _shards(trainer)
    flat = getattr(trainer.strategy, "shard_group", None) is not None  # each rank has a part of it as a plain tensor
    for name, parameter in named_parameters(trainer):
        if id(parameter) in shards:
            whole, own = shards[id(parameter)]
            yield name, parameter, Owned(own if _counted_here(parameter) else None, whole)
            continue
        gradient: Any = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
        if gradient is None:
            yield name, parameter, Owned(None, None)
            continue
        own, counted = gradient, flat or ranks.is_rank_zero()
        if isinstance(gradient, DTensor):
            places = zip(gradient.placements, gradient.device_mesh.get_coordinate() or (), strict=True)
            own, counted = gradient.to_local(), all(placement.is_shard() or at == 0 for placement, at in places)
        yield name, parameter, Owned(own.reshape(-1) if counted else None, gradient)


def _shards(trainer: Any) -> dict[int, tuple[Tensor, Optional[Tensor]]]:
    """The gradient of each parameter in Megatron-Core's buffers, and the part of it that this rank counts."""
    shards: dict[int, tuple[Tensor, Optional[Tensor]]] = {}
    for chunk in getattr(trainer.strategy, "megatron_parallel", None) or ():
        sharded = bool(getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False))
        buffers = [*(_list(chunk, "buffers")), *(_list(chunk, "expert_parallel_buffers"))]
        for buffer in buffers:
            rank, ranks = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // ranks
                first, last = (rank * size, (rank + 1) * size) if sharded else (0, bucket.grad_data.numel())
                for parameter in bucket.params_list:
                    # Its view gives its position, because the bucket's own index leaves out the padding between
                    # parameters.
                    whole = parameter.main_grad.view(-1)
                    start = whole.storage_offset() - bucket.grad_data.storage_offset()
                    own = whole[max(first - start, 0) : max(last - start, 0)]
                    shards[id(parameter)] = whole, own if sharded or rank == 0 else None
    return shards


def _list(chunk: Any, name: str) -> list[Any]:
    kept = chunk.__dict__.get(name)  # torch has a method `buffers`
    return kept if isinstance(kept, list) else []


def _counted_here(parameter: nn.Parameter) -> bool:
    """Whether no other tensor-parallel rank or pipeline stage counts the same parameter, as required by
    Megatron-Core's norm."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    return not getattr(parameter, "shared", False) and param_is_not_tensor_parallel_duplicate(parameter)
