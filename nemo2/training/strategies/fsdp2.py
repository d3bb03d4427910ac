# SPDX-License-Identifier: Apache-2.0
"""`FSDP2Strategy`: shards any model with torch's ``fully_shard``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from nemo2.base.counts import count_problems, counted
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.forms.form import Part
from nemo2.config.capture import configurable
from nemo2.config.notices import announce_machine_settings
from nemo2.data.sampler import DataSampler
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.parallel.sharded_chunk import blocks_of, sharding_mesh
from nemo2.mcore.parallel.tensor_plan import parallel_styles, plan_of
from nemo2.training.strategies.torch_sharded import NO_SECOND_MEMORY, STEPS, TorchShardedStrategy, shared_arguments


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: Optional[MixedPrecisionPolicy] = None,
    offload_policy: Optional[OffloadPolicy] = None,
    tp_shard_plan: Optional[Mapping[str, Any]] = None,
) -> nn.Module:
    """Shard ``model`` in place.

    Tensors named in ``tp_shard_plan`` are sharded over the mesh's "tp" axis. All parameters are then sharded over its
    "shard" axis. Each repeated block (`nemo2.mcore.parallel.sharded_chunk.blocks_of`) is gathered for its own forward and
    backward. The remaining parameters are gathered with the root module and stay gathered until the backward.

    Args:
        model: The model, in fp32, on its device.
        device_mesh: A mesh with the axes "shard" and "tp".
        mp_policy: The dtypes of the forward and of the gradient reduction. Its ``output_dtype`` applies to the model's
            output; activations between blocks keep the forward's dtype. None: the parameters' dtype.
        offload_policy: Keeps shards on the CPU between steps. None: shards stay on the device.
        tp_shard_plan: Torch's parallel styles by module name, with ``*`` for any layer. None: tensors are not sharded
            over "tp".
    """
    if tp_shard_plan and device_mesh["tp"].size() > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, device_mesh["tp"], dict(tp_shard_plan))
    policy = mp_policy or MixedPrecisionPolicy()
    # A layer after the blocks is sharded with the root, so its weights have the forward's dtype and its input must too.
    inner = replace(policy, output_dtype=None)
    options: dict[str, Any] = {"mesh": device_mesh["shard"]}
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    for block in blocks_of(model):
        fully_shard(block, mp_policy=inner, **options)
    fully_shard(model, mp_policy=policy, **options)
    return model


@configurable
class FSDP2Strategy(TorchShardedStrategy):
    """Shard parameters, gradients and optimizer state over all ranks with torch's ``fully_shard``.

    The strategy trains nemo2's GPT models, Hugging Face models and plain modules. The rest of the recipe stays the
    same: global batches and micro-batches, loss reduction, gradient clipping, schedules, logging and checkpoints work
    as with `MegatronStrategy`.

    The forward gathers one block at a time in the precision plugin's dtype. The optimizer updates fp32 parameters.
    `MegatronStrategy` can read the checkpoints of GPT models, and this strategy can read the weights of
    `MegatronStrategy`'s checkpoints.

    Args:
        data_parallel_size: The number of ranks that see different samples. "auto": the world size divided by the other
            sizes. A number must equal that quotient.
        tensor_parallel_size: The number of ranks that share each weight matrix. "auto": 1. Above 1 the model needs a
            tensor-parallel plan.
        context_parallel_size: The number of ranks that share each sequence, for nemo2's GPT models only. Parameters are
            sharded over these ranks too.
        sequence_parallel: Must be False. For sequence parallelism put torch's ``SequenceParallel`` into
            ``custom_tp_plan``.
        offload_policy: torch's ``OffloadPolicy``. None: shards stay on the device. On CPU ranks they always do.
        mp_policy: torch's ``MixedPrecisionPolicy``. None: derived from the precision plugin.
        parallelize_fn: The function that shards the model, with the arguments ``(model, device_mesh, mp_policy,
            offload_policy, tp_shard_plan)``. Default: `fsdp2_strategy_parallelize`.
        use_hf_tp_plan: With ``tensor_parallel_size`` above 1, use the plan that a Hugging Face model brings.
        custom_tp_plan: The plan by module name, as torch's ``parallelize_module`` takes it. None: the model's own plan.
        data_sampler, checkpoint_io, parallel_devices, cluster_environment, restore_config, ckpt_load_optimizer,
            ckpt_save_optimizer, ckpt_save_part, process_group_backend, replace_progress_bar, progress_interval: As in
            `MegatronStrategy`.

    Raises:
        ConfigError: a size that can't work or contradicts the world size.
    """

    def __init__(
        self,
        data_parallel_size: Union[Literal["auto"], int] = "auto",
        tensor_parallel_size: Union[Literal["auto"], int] = "auto",
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        offload_policy: Optional[OffloadPolicy] = None,
        data_sampler: Optional[DataSampler] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        mp_policy: Optional[MixedPrecisionPolicy] = None,
        parallelize_fn: Callable[..., nn.Module] = fsdp2_strategy_parallelize,
        use_hf_tp_plan: bool = True,
        custom_tp_plan: Optional[dict[str, Any]] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        process_group_backend: Optional[str] = None,
        restore_config: Optional[RestoreConfig] = None,
        ckpt_load_optimizer: bool = True,
        ckpt_save_optimizer: bool = True,
        replace_progress_bar: bool = True,
        progress_interval: int = 1,
        ckpt_save_part: Optional[Part] = None,
    ) -> None:
        tp = 1 if tensor_parallel_size == "auto" else tensor_parallel_size
        wrong_sizes = count_problems(
            "strategy",
            others=("auto",),
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            context_parallel_size=context_parallel_size,
        )
        problems: list[str] = []
        if sequence_parallel:
            problems.append(
                "strategy.sequence_parallel=True: with FSDP2Strategy the tensor-parallel plan shards the sequence "
                "module by module. Add torch's SequenceParallel to strategy.custom_tp_plan and leave "
                "sequence_parallel=False, or use MegatronStrategy."
            )
        if custom_tp_plan and tp == 1:
            problems.append(
                "strategy.custom_tp_plan has no effect with tensor_parallel_size=1. Set strategy.tensor_parallel_size, "
                "or leave custom_tp_plan unset."
            )
        if wrong_sizes or problems:
            rules = ["sizes-are-counts"] * len(wrong_sizes) + ["strategy-settings-are-supported"] * len(problems)
            raise ConfigError("\n".join(wrong_sizes + problems), rules=rules)
        super().__init__(layout=Layout(tp=tp, cp=context_parallel_size), **shared_arguments(locals()))
        self.data_parallel_size = data_parallel_size
        self.offload_policy = offload_policy
        self.mp_policy = mp_policy
        self.parallelize_fn = parallelize_fn
        self.use_hf_tp_plan = use_hf_tp_plan
        self.custom_tp_plan = custom_tp_plan
        self.device_mesh: Optional[DeviceMesh] = None

    @property
    def tensor_parallel_size(self) -> int:
        """The size that was passed, or 1 for "auto". Read-only."""
        return self.layout.tp

    @property
    def context_parallel_size(self) -> int:
        """The size that was passed. Read-only."""
        return self.layout.cp

    @property
    def sequence_parallel(self) -> bool:
        """Always False, because the tensor-parallel plan shards the sequence module by module."""
        return False

    def problems_with(self, config: Any, dtypes: Any, optimizer: Any) -> Iterator[str]:
        yield from super().problems_with(config, dtypes, optimizer)
        if self.layout.tp > 1 and isinstance(config, TransformerConfig):
            yield (
                f"strategy.tensor_parallel_size={self.layout.tp}: nemo2's GPT models are sharded by Megatron-Core's tensor "
                "parallelism, not by a DTensor plan. Use MegatronStrategy(tensor_model_parallel_size=...), with "
                "fsdp='megatron' to shard parameters as well."
            )

    def world_problem(self, world_size: int) -> Optional[str]:
        size = self.layout.data_parallel_size(world_size)
        if self.data_parallel_size in ("auto", size):
            return None
        return (
            f"strategy.data_parallel_size={self.data_parallel_size} contradicts the world: {counted(world_size, 'rank')} / "
            f"(tensor_parallel_size {self.layout.tp} * context_parallel_size {self.layout.cp}) = {size}. Set "
            f"data_parallel_size={size} or 'auto'."
        )

    def _check_world(self, world_size: int) -> None:
        super()._check_world(world_size)
        if problem := self.world_problem(world_size):
            raise ConfigError(problem)
        self._check_model()

    def _check_model(self) -> None:
        """Check that this model can be sharded as requested.

        Raises:
            ConfigError: context parallelism of a model that isn't nemo2's.
        """
        module: Any = self.lightning_module
        megatron = isinstance(getattr(module, "config", None), TransformerConfig)
        if self.layout.cp > 1 and not megatron:
            raise ConfigError(
                f"strategy.context_parallel_size={self.layout.cp}: only nemo2's GPT models shard sequences. With "
                f"{type(module).__name__}, all context-parallel ranks would train on the same whole sequences. Set "
                "context_parallel_size=1."
            )

    def shard(self, config: TransformerConfig, model: nn.Module) -> nn.Module:
        self.device_mesh = sharding_mesh(self.layout.tp, self.root_device.type)
        plan = None
        if self.layout.tp > 1:
            plan = parallel_styles(plan_of(model, custom=self.custom_tp_plan, from_model=self.use_hf_tp_plan))
        cut = self.parallelize_fn(
            model,
            device_mesh=self.device_mesh,
            mp_policy=self.mp_policy or self.forward_dtypes(),
            offload_policy=self._offloading(),
            tp_shard_plan=plan,
        )
        if not isinstance(model, MegatronModule):
            # Steps that call the layers directly must gather the root's parameters too.
            for name in STEPS:
                if callable(getattr(type(model), name, None)):
                    register_fsdp_forward_method(cut, name)
        return cut

    def _offloading(self) -> Optional[OffloadPolicy]:
        if not isinstance(self.offload_policy, CPUOffloadPolicy) or self.root_device.type != "cpu":
            return self.offload_policy
        announce_machine_settings({"strategy.offload_policy": (None, NO_SECOND_MEMORY)})
        return None
