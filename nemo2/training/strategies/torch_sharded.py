# SPDX-License-Identifier: Apache-2.0
"""The base of strategies that let torch shard the model: the step is Megatron-Core's, parameters and optimizer are
torch's.

The recipe stays the same. Its ``MegatronOptimizerModule`` makes torch's optimizer with the same hyperparameters, groups
and clipping. Its precision plugin sets the dtype of the forward, while the sharded parameters stay in fp32. Checkpoints
have the same directory layout as under other strategies.
"""

import inspect
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy

from nemo2.base.errors import ConfigError
from nemo2.checkpoint.forms.dtensors import DTensorForm
from nemo2.checkpoint.forms.form import Part
from nemo2.checkpoint.torch_io import torch_checkpoint_io
from nemo2.config.notices import announce_machine_settings
from nemo2.config.requested import at, explicit_fields
from nemo2.mcore.optim.sharded import ShardedOptimizer, unsupported_optimizer
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.layout import Layout, ParallelismConfig
from nemo2.mcore.parallel.plain_chunk import PlainChunk
from nemo2.mcore.parallel.sharded_chunk import ShardedChunk, convert_masters_to_fp32, meta_parameters
from nemo2.mcore.parallel.stored_names import stored_chunk
from nemo2.mcore.parallel.transform import record_of, refuse_reading_weights
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.run_settings import RunSettings
from nemo2.mcore.settle.settling import settle_sharded
from nemo2.training.strategies.base import BaseStrategy

STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward_step")
"""Methods of a user's module that may use its layers outside of its ``forward``."""
NO_SECOND_MEMORY = "CPU ranks already keep their shards in the CPU's memory"
"""The reason why shards of CPU ranks can't be offloaded."""


def _form_setting(name: str, doc: str) -> Any:
    """A setting of the strategy's form, which may be set until it is used."""
    return property(
        lambda strategy: getattr(strategy.form, name),
        lambda strategy, value: setattr(strategy.form, name, value),
        doc=doc,
    )


class TorchShardedStrategy(BaseStrategy):
    """Base class of strategies whose models torch shards. Subclasses define `shard`.

    Args:
        layout: Only ``tp`` and ``cp`` may differ from 1. All ranks that don't share tensors shard parameters.
        checkpoint_io, ckpt_load_optimizer, ckpt_save_optimizer, ckpt_save_part: As in `MegatronStrategy`.
        options: The arguments of `BaseStrategy`.
    """

    sharded_by_torch: ClassVar[bool] = True
    """Parameters, gradients and states are sharded over all data-parallel ranks. Also readable on a config of the
    strategy."""

    def __init__(
        self,
        *,
        layout: Layout,
        checkpoint_io: Optional[CheckpointIO],
        ckpt_load_optimizer: bool,
        ckpt_save_optimizer: bool,
        ckpt_save_part: Optional[Part],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.layout = layout
        self.form = self.form_of_checkpoints(
            self, load_optimizer=ckpt_load_optimizer, save_optimizer=ckpt_save_optimizer, part=ckpt_save_part
        )
        self._checkpoint_io = torch_checkpoint_io(checkpoint_io, strategy=type(self).__name__)

    ckpt_load_optimizer = _form_setting("load_optimizer", "Whether a load includes the optimizer's state.")
    ckpt_save_optimizer = _form_setting("save_optimizer", "Whether saves include the optimizer's state.")

    form: DTensorForm
    form_of_checkpoints: ClassVar[type[DTensorForm]] = DTensorForm
    _one_dtype: bool = False
    """Whether parameters that are sharded together must have the same dtype, frozen or not."""

    @abstractmethod
    def shard(self, config: TransformerConfig, model: nn.Module) -> nn.Module:
        """Shard ``model``, in fp32 and on this rank's device, over the ranks. Returns the model or a wrapper."""

    # ------------------------------------------------------------------------------------------------------ building

    def problems_with(self, config: Any, dtypes: Any, optimizer: Any) -> Iterator[str]:
        """What this strategy can't do, as requested by the configurations of a model, of the precision and of the optimizer.
        None: there is none."""
        if problem := unsupported_optimizer(optimizer):
            yield problem
        if getattr(optimizer, "optimizer_cpu_offload", False):
            yield (
                f"optim.config.optimizer_cpu_offload=True with {type(self).__name__}: torch keeps the optimizer's states where "
                "it keeps the shards. Set optimizer_cpu_offload=False, and FSDP2Strategy(offload_policy=CPUOffloadPolicy()) or "
                "FSDPStrategy(cpu_offload=True), or use MegatronStrategy."
            )
        for name in ("optimizer_cuda_graph", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"):
            if getattr(optimizer, name, False) and name in explicit_fields(optimizer):
                yield (
                    f"optim.config.{name}=True with {type(self).__name__}: torch's optimizers neither capture their step nor "
                    f"gather parameters, which the shards do as layers need them. Leave {name} unset."
                )
        for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if (dtype := getattr(optimizer, name, torch.float32)) is not torch.float32:
                yield (
                    f"optim.config.{name}={dtype} with {type(self).__name__}: torch's optimizers keep parameters, gradients and "
                    f"moments in fp32. Leave {name} unset, or use MegatronStrategy."
                )
        if kind_of(config) != "none":
            yield (
                f"model.config.cuda_graph_impl={config.cuda_graph_impl!r}{at(config, 'cuda_graph_impl')} with "
                f"{type(self).__name__}: a CUDA graph requires parameters at fixed addresses, but this strategy "
                "gathers parameters into new memory in every step. Set cuda_graph_impl='none', or use MegatronStrategy."
            )
        if (
            getattr(config, "mtp_detach_heads", False)
            and config.mtp_num_layers
            and getattr(optimizer, "clip_grad", 0.0)
        ):
            yield (
                f"model.config.mtp_detach_heads=True{at(config, 'mtp_detach_heads')} with {type(self).__name__}: Megatron-Core "
                "clips gradients of detached heads by a norm of their own, but this strategy has one norm for the whole model. "
                "Set mtp_detach_heads=False or optim.config.clip_grad=0.0, or use MegatronStrategy."
            )
        requested = {"trainer.plugins": dtypes, "model.config": config}
        for path, name in itertools.product(requested, ("fp8", "fp4")):
            if (value := getattr(requested[path], name, None)) is not None:
                yield (
                    f"{path}.{name}={value!r} with {type(self).__name__}: torch gathers parameters in 16 or 32 bits. Leave "
                    f"{name} unset, or use MegatronStrategy."
                )

    def world_problem(self, world_size: int) -> Optional[str]:
        """Why this strategy can't train in a world of this size, besides its layout. None: it can."""

    def settle(self, model: pl.LightningModule) -> None:
        """Write precision and context parallelism into the configurations of the model and the optimizer."""
        optim, config = getattr(model, "optim", None), getattr(model, "config", None)
        precision = self.precision_plugin
        dtypes = precision.dtype_config if isinstance(precision, MegatronMixedPrecision) else None
        if problems := list(self.problems_with(config, dtypes, getattr(optim, "config", None))):
            raise ConfigError(" ".join(problems))
        run = RunSettings(
            parallelism=self.parallelism,
            optimizer_config=getattr(optim, "config", None),
            model_config=config if isinstance(config, TransformerConfig) else None,
            precision=precision,
            machine=Machine.here(),
        )
        settled = settle_sharded(run, run.machine, strategy=type(self))
        settled.apply(run)
        announce_machine_settings(settled.machine_decides)

    @property
    def parallelism(self) -> ParallelismConfig:
        """The sizes of Megatron-Core's groups, which only models use that shard sequences over context-parallel ranks."""
        return ParallelismConfig(**Layout(cp=self.layout.cp).fields())

    def setup_megatron_parallel(self, trainer: pl.Trainer, *, wrap: bool) -> None:
        built = self.megatron_parallel
        if built is None or built.pl_module is not self.lightning_module:
            super().setup_megatron_parallel(trainer, wrap=wrap)
            return
        self.model = built  # torch shards a model once
        for part in built.modules() if wrap else ():
            if isinstance(part, FullyShardedDataParallel):
                raise ConfigError(
                    f"{type(self).__name__}: this model was used before, and its parameters may be gathered, which the "
                    "optimizer can't update. Create the model anew and load a checkpoint, or use FSDP2Strategy."
                )
            if isinstance(part, FSDPModule):
                part.reshard()  # after an evaluation the root's parameters are still gathered

    def chunk_options(self, *, wrap: bool) -> dict[str, Any]:
        return {"wrap_chunk": self._wrap_chunk}

    def _wrap_chunk(self, config: TransformerConfig, core: nn.Module) -> ShardedChunk:
        if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in core.modules()):
            raise ConfigError(
                f"{type(self).__name__}: this model was sharded by another trainer's strategy. Use that trainer again, or "
                "create the model anew and load a checkpoint."
            )
        if (record := record_of(core)) is not None and self.shard_group is not None:
            refuse_reading_weights(record.by, under=type(self).__name__)
        # The user's own module may have been created before seeding.
        if torch.distributed.get_world_size() > 1:
            for tensor in [*core.parameters(), *core.buffers()]:
                torch.distributed.broadcast(tensor.detach(), src=0)
        convert_masters_to_fp32(core, frozen_too=self._one_dtype)
        self.form.chunk = stored_chunk(core)
        unsharded = meta_parameters(core)
        # The user's own module is sharded itself, because its steps call its layers directly rather than through the
        # surrounding chunk.
        if isinstance(core, PlainChunk):
            core.module = self.shard(config, core.module)
            sharded: nn.Module = core
        else:
            sharded = self.shard(config, core)
        if self.shard_group is not None:
            return ShardedChunk(
                config, sharded, num_shards=self.num_shards, whole=unsharded, shard_group=self.shard_group
            )
        # The shards are new parameters, without the attributes by which Megatron-Core chooses an embedding's learning rate.
        for name, parameter in core.named_parameters():
            vars(parameter).update(vars(unsharded[name]))
        return ShardedChunk(config, sharded, num_shards=self.num_shards)

    @property
    def shard_group(self) -> Optional[torch.distributed.ProcessGroup]:
        """The ranks over which gradients in plain tensors are sharded. None: gradients are DTensors, which know
        their ranks."""
        return None

    @property
    def num_shards(self) -> int:
        """The number of ranks that the parameters are sharded over."""
        return torch.distributed.get_world_size() // self.layout.tp

    def forward_dtypes(self) -> MixedPrecisionPolicy:
        """The precision plugin's mixed-precision policy for parameters that are sharded in fp32."""
        precision = self.precision_plugin
        if not isinstance(precision, MegatronMixedPrecision) or precision.dtype_config.fp32:
            return MixedPrecisionPolicy()
        dtypes = precision.dtype_config
        reduce_dtype = torch.float32 if dtypes.grad_reduce_in_fp32 else dtypes.params_dtype
        return MixedPrecisionPolicy(
            param_dtype=dtypes.params_dtype, reduce_dtype=reduce_dtype, output_dtype=torch.float32
        )

    def connect_optimizer(self) -> None:
        assert self.megatron_parallel is not None
        [optimizer] = self.optimizers
        if not isinstance(optimizer, ShardedOptimizer):
            self.optimizers = [ShardedOptimizer(optimizer, shard_group=self.shard_group)]
        config: Any = self.megatron_parallel.config
        config.grad_scale_func = self.form.optimizer.scale_loss


def shared_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a subclass passes on unchanged, by name: those of `TorchShardedStrategy` and `BaseStrategy`.

    Each subclass repeats them in its own signature, because recipes are checked against the signature.
    """
    inherited = (TorchShardedStrategy.__init__, BaseStrategy.__init__)
    names = {name for initialize in inherited for name in inspect.signature(initialize).parameters} - {"self"}
    return {name: value for name, value in arguments.items() if name in names}
