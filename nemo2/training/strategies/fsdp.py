# SPDX-License-Identifier: Apache-2.0
"""`FSDPStrategy`: torch's first FullyShardedDataParallel, which flattens the parameters of a block into one vector."""

import functools
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.base.variables import replaced
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.forms.dtensors import FlatForm
from nemo2.checkpoint.forms.form import Part
from nemo2.config.capture import configurable
from nemo2.config.notices import announce_machine_settings
from nemo2.data.sampler import DataSampler
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.parallel.sharded_chunk import blocks_of, sharding_mesh
from nemo2.training.strategies.torch_sharded import NO_SECOND_MEMORY, STEPS, TorchShardedStrategy, shared_arguments

_SHARDING = {name: ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP")}


@configurable
class FSDPStrategy(TorchShardedStrategy):
    """Shard a model with torch's FullyShardedDataParallel (FSDP1). For new recipes use its successor, `FSDP2Strategy`.

    Args:
        auto_wrap_policy: Module classes whose instances are gathered for their own forward and backward, or a wrap
            policy of torch. None: the model's repeated blocks (`nemo2.mcore.parallel.sharded_chunk.blocks_of`).
        state_dict_type: Must be "sharded": every rank writes its own part of a checkpoint.
        sharding_strategy: "FULL_SHARD": shard parameters, gradients and optimizer state. "SHARD_GRAD_OP": keep
            parameters gathered between forward and backward.
        cpu_offload: Keep shards on the CPU between steps. Has no effect on CPU ranks.
        mixed_precision: torch's ``MixedPrecision``. None: derived from the precision plugin.
        data_sampler, checkpoint_io, parallel_devices, cluster_environment, restore_config, ckpt_load_optimizer,
            ckpt_save_optimizer, ckpt_save_part, process_group_backend, replace_progress_bar, progress_interval: As in
            `MegatronStrategy`.

    Raises:
        ConfigError: a value that can't work.
    """

    def __init__(
        self,
        auto_wrap_policy: Optional[Any] = None,
        state_dict_type: str = "sharded",
        ckpt_load_optimizer: bool = True,
        ckpt_save_optimizer: bool = True,
        data_sampler: Optional[DataSampler] = None,
        sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD",
        cpu_offload: Union[bool, CPUOffload] = False,
        mixed_precision: Optional[MixedPrecision] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        process_group_backend: Optional[str] = None,
        restore_config: Optional[RestoreConfig] = None,
        replace_progress_bar: bool = True,
        progress_interval: int = 1,
        ckpt_save_part: Optional[Part] = None,
    ) -> None:
        problems = []
        if state_dict_type != "sharded":
            problems.append(
                f"strategy.state_dict_type={state_dict_type!r}: must be 'sharded'. Every rank writes its own shard of "
                "a checkpoint, and any number of ranks can read the checkpoint."
            )
        if sharding_strategy not in _SHARDING:
            problems.append(
                f"strategy.sharding_strategy={sharding_strategy!r}: must be one of {', '.join(_SHARDING)}; to shard "
                f"nothing, use MegatronStrategy{did_you_mean(str(sharding_strategy), _SHARDING, listed=True)}"
            )
        if problems:
            raise ConfigError(" ".join(problems))
        super().__init__(layout=Layout(), **shared_arguments(locals()))
        self.auto_wrap_policy = auto_wrap_policy
        self.state_dict_type = state_dict_type
        self.sharding_strategy = sharding_strategy
        self.cpu_offload = cpu_offload
        self.mixed_precision = mixed_precision

    form_of_checkpoints = FlatForm
    _one_dtype = True

    @property
    def shard_group(self) -> Any:
        return torch.distributed.group.WORLD

    def shard(self, config: TransformerConfig, model: nn.Module) -> nn.Module:
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=self._policy(model),
            sharding_strategy=_SHARDING[self.sharding_strategy],
            cpu_offload=self._offloading(),
            mixed_precision=self.mixed_precision or self._dtypes(),
            device_id=self.root_device,
            use_orig_params=True,
            device_mesh=sharding_mesh(1, self.root_device.type)["shard"],
        )
        if not isinstance(model, MegatronModule):
            _run_steps_inside_forward(wrapped, model)
        return wrapped

    def _offloading(self) -> CPUOffload:
        offload = CPUOffload(self.cpu_offload) if isinstance(self.cpu_offload, bool) else self.cpu_offload
        if not offload.offload_params or self.root_device.type != "cpu":
            return offload
        announce_machine_settings({"strategy.cpu_offload": (False, NO_SECOND_MEMORY)})
        return CPUOffload(offload_params=False)

    def _policy(self, model: nn.Module) -> Any:
        if isinstance(self.auto_wrap_policy, (set, frozenset, list, tuple)):
            return ModuleWrapPolicy(self.auto_wrap_policy)
        if self.auto_wrap_policy is not None:
            return self.auto_wrap_policy
        blocks = blocks_of(model)
        # FSDP1 flattens a block into one vector, whose elements all train or are all frozen. In a block with frozen
        # parameters, each module with trainable parameters therefore becomes its own vector.
        apart = [module for block in blocks if _is_mixed(block) for module in block.modules() if _trains_itself(module)]
        wanted = {id(module) for module in (*blocks, *apart)}
        return CustomPolicy(lambda module: id(module) in wanted)

    def _dtypes(self) -> Optional[MixedPrecision]:
        policy = self.forward_dtypes()
        if policy.param_dtype is None:
            return None
        return MixedPrecision(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)


def _is_mixed(block: nn.Module) -> bool:
    return len({parameter.requires_grad for parameter in block.parameters()}) > 1


def _trains_itself(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _run_steps_inside_forward(wrapped: FullyShardedDataParallel, module: nn.Module) -> None:
    """Run the module's steps inside the wrapper's forward, because torch gathers parameters only there."""

    def led(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            forward = module.forward

            def instead(*inner: Any, **named: Any) -> Any:
                module.forward = forward  # the step may call it
                return step(*inner, **named)

            with replaced(module, forward=instead):
                return wrapped(*args, **kwargs)

        return run

    for name in STEPS:
        if callable(getattr(type(module), name, None)):
            setattr(module, name, led(getattr(module, name)))
