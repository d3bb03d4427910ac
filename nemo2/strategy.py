# SPDX-License-Identifier: Apache-2.0
"""`MegatronStrategy`: Lightning's hooks mapped onto Megatron-Core.

What happens, in Lightning's order:

    connect              the parallel sizes, the precision and the backend's rules go into the model's configuration
    setup_environment    device, process group, Megatron-Core's groups, random streams
    setup                chunks built and wrapped (`MegatronParallel`), optimizer, the loop told that backward is not its job
    training_step        gradients zeroed, the schedule runs forward and backward over this rank's share of a global batch
    optimizer_step       Megatron-Core's optimizer, metrics on the steps that log
    save / load          sharded state through `MegatronCheckpointIO`

This file holds what is the strategy's own, its arguments and the building; `nemo2.strategies` holds the rest: `world` (ranks,
groups, data), `stepping` (steps, metrics), `checkpoints`, and `megatron_config` (its arguments). What is written into
which configuration is `nemo2.settle`'s.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from megatron.core.distributed import DistributedDataParallelConfig

from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.forms.form import Part
from nemo2.checkpoint.forms.megatron import MegatronForm
from nemo2.checkpoint.forms.megatron_fsdp import MegatronFSDPForm
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.torch_io import TorchCheckpointIO
from nemo2.config.adjust import adjusting
from nemo2.config.capture import configurable
from nemo2.config.explicit import explicit_fields, note_explicit_fields
from nemo2.config.machine_settings import announce
from nemo2.config.requested import refuse_silent_changes
from nemo2.errors import ConfigError
from nemo2.optim.base import OptimizerModule
from nemo2.optim.megatron import MegatronOptimizer
from nemo2.overlap.apply import leave_one_bucket
from nemo2.overlap.userbuffers import OneSize, start_userbuffers, stop_userbuffers
from nemo2.parallel.cuda_graphs import kind_of
from nemo2.parallel.fsdp import turn_on, unshared
from nemo2.parallel.hooks import CallbackConnector
from nemo2.parallel.layout import LAYOUT_FIELDS, Layout, ParallelismConfig
from nemo2.parallel.megatron_parallel import MegatronParallel
from nemo2.parallel.transform import transform_of
from nemo2.precision import MegatronMixedPrecision
from nemo2.settle.machine import Machine
from nemo2.settle.settling import RunSettings, settle_run
from nemo2.strategies.checkpoints import Checkpoints
from nemo2.strategies.live_settings import LiveSettings
from nemo2.strategies.megatron_config import (
    MAIN_PARAMETERS_TWICE,
    ddp_config_of,
    one_number_of_instances,
    refuse_out_of_range,
    refuse_what_is_gone,
    strictness_of,
)
from nemo2.strategies.timers import timers_of
from nemo2.strategies.world import collective_timeout

_log = logging.getLogger(__name__)


@configurable(ddp_config="ddp")
class MegatronStrategy(LiveSettings, Checkpoints):
    """Train with Megatron-Core's parallelisms under Lightning.

    Parameters are NeMo 2.0's; the sizes have the defaults "not cut". ``ddp_config`` is a second spelling of ``ddp``. They can
    be read as attributes, and sizes and what checkpoints hold be set until the strategy is connected to a model.

    Args:
        tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size: Ranks
            that share one replica of the model, by what they share. The data-parallel size is what is left of the world.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline rank (interleaved schedule). None: not interleaved.
        expert_tensor_parallel_size: Tensor-parallel ranks inside an expert. None: the same as outside.
        sequence_parallel: Cut activations between matrix products over the tensor-parallel ranks.
        microbatch_group_size_per_vp_stage: Micro-batches that a virtual stage runs in a row. None: the pipeline size.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: Uneven first and last stages. None: even.
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: Count the embedding, the loss as a layer.
        pipeline_model_parallel_layout: Which layers each stage holds, in Megatron-Core's notation. None: even.
        pipeline_dtype: Of what stages send each other, which is the dtype of activations between layers: nothing else is taken.
            None: follows the precision.
        pipeline_model_parallel_comm_backend: "nccl" or "ucc". None: the backend of the world. Where ranks talk over gloo, the
            run says that this, ``use_sharp`` and ``nccl_communicator_config_path`` are left out.
        ddp: "megatron" or a ``DistributedDataParallelConfig``: buckets, overlap, the distributed optimizer.
        num_distributed_optimizer_instances: Replicas of the sharded optimizer state.
        use_tp_pp_dp_mapping: Number ranks tensor, pipeline, data (else tensor, context, expert, data, pipeline).
        nccl_communicator_config_path: YAML with NCCL settings per group, for Megatron-Core.
        use_sharp: Let the switch reduce for the data-parallel groups.
        use_gloo_process_groups: Also make gloo groups, for the optimizer's checkpoints.
        gradient_as_bucket_view: True: Megatron-Core's gradients are views of its buffers.
        data_sampler: Splits batches. None: the data module's ``data_sampler``.
        parallel_devices, cluster_environment, checkpoint_io: As Lightning's DDPStrategy.
        find_unused_parameters: Has no meaning for Megatron-Core's gradient buffers: False.
        ckpt_load_optimizer, ckpt_save_optimizer: Whether optimizer state takes part.
        ckpt_load_main_params: Begin with the fp32 parameters that the checkpoint's optimizer kept, and nothing else of it,
            rather than with the 16-bit ones that were rounded from them. Not with ``ckpt_load_optimizer``.
        save_ckpt_format: "torch_dist".
        ckpt_async_save: Write checkpoints in the background.
        ckpt_torch_dist_multiproc: Writer processes per rank. None: Megatron-Core's choice.
        ckpt_assume_constant_structure, ckpt_parallel_save, ckpt_parallel_save_within_dp, ckpt_parallel_load: See
            `MegatronCheckpointIO`.
        ckpt_parallel_save_optim: Save the optimizer's state so that any layout can load it; False: faster, for the same
            model-parallel layout only.
        ckpt_load_directly_on_device: Kept for NeMo's signature.
        ckpt_load_strictness: Megatron-Core's ``StrictHandling`` by name; it calls "unexpected" what the model has and the
            checkpoint doesn't. None or True: that is an error, and what the checkpoint has beyond the model is ignored. False:
            "log_all".
        ckpt_save_part: Save a part of the model only: "trained" parameters, or those whose full name a function takes. The rest
            comes from the checkpoint that the run began with (``restore_config``), on resuming too. None: all of it.
        restore_config: Weights to start from, when no checkpoint is resumed.
        setup_optimizers: False: no optimizer is made. The module has ``automatic_optimization = False`` and updates its
            parameters itself, from their ``main_grad``; each global batch counts as a step.
        init_model_parallel: False: somebody else has made Megatron-Core's groups, of this layout.
        lazy_init: Must be False; the rehearsal builds models without memory.
        use_te_rng_tracker: Transformer Engine's random-stream tracker. CUDA graphs (``model.config.cuda_graph_impl``) turn it
            on.
        replace_progress_bar, progress_interval: Our progress line or bar in place of Lightning's, every so many steps; 0: no
            line.
        megatron_log_level: 0 to 2: which of Megatron-Core's timers run; they are told where steps are logged. Each waits for the
            device: steps take longer.
        fsdp: "megatron": shard parameters, gradients and optimizer state with Megatron-FSDP, or as much of it as
            ``ddp_config.data_parallel_sharding_strategy`` says. None: as ``ddp`` says. For torch's own see `FSDP2Strategy`.
        moe_extended_tp, encoder_tensor_model_parallel_size, encoder_pipeline_model_parallel_size: Gone from Megatron-Core;
            any value but the default is an error that says what to use.

    Raises:
        ConfigError: a value that can't work, or that Megatron-Core no longer has.
    """

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        pipeline_model_parallel_comm_backend: Optional[str] = None,
        num_layers_in_first_pipeline_stage: Optional[int] = None,
        num_layers_in_last_pipeline_stage: Optional[int] = None,
        virtual_pipeline_model_parallel_size: Optional[int] = None,
        microbatch_group_size_per_vp_stage: Optional[int] = None,
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        expert_model_parallel_size: int = 1,
        moe_extended_tp: bool = False,
        expert_tensor_parallel_size: Optional[int] = None,
        encoder_tensor_model_parallel_size: Optional[int] = 0,
        encoder_pipeline_model_parallel_size: Optional[int] = 0,
        account_for_embedding_in_pipeline_split: bool = False,
        account_for_loss_in_pipeline_split: bool = False,
        data_sampler: Optional[Any] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        find_unused_parameters: bool = False,
        ckpt_load_optimizer: bool = True,
        ckpt_save_optimizer: bool = True,
        ckpt_load_main_params: bool = False,
        ddp: Union[Literal["megatron", "pytorch"], DistributedDataParallelConfig] = "megatron",
        fsdp: Optional[Literal["megatron", "pytorch"]] = None,
        lazy_init: bool = False,
        pipeline_dtype: Optional[torch.dtype] = None,
        use_te_rng_tracker: bool = False,
        use_sharp: bool = False,
        save_ckpt_format: str = "torch_dist",
        ckpt_async_save: bool = True,
        ckpt_torch_dist_multiproc: Optional[int] = None,
        ckpt_assume_constant_structure: bool = False,
        ckpt_parallel_save: bool = True,
        ckpt_parallel_save_within_dp: bool = False,
        ckpt_parallel_load: bool = True,
        ckpt_parallel_save_optim: bool = True,
        ckpt_load_directly_on_device: bool = True,
        ckpt_load_strictness: Optional[Union[str, bool]] = None,
        setup_optimizers: bool = True,
        init_model_parallel: bool = True,
        replace_progress_bar: bool = True,
        progress_interval: int = 1,
        restore_config: Optional[RestoreConfig] = None,
        megatron_log_level: int = 0,
        use_tp_pp_dp_mapping: bool = False,
        num_distributed_optimizer_instances: int = 1,
        nccl_communicator_config_path: Optional[str] = None,
        pipeline_model_parallel_layout: Optional[Union[str, list]] = None,
        use_gloo_process_groups: bool = True,
        gradient_as_bucket_view: bool = True,
        ckpt_save_part: Optional[Part] = None,
    ) -> None:
        refuse_what_is_gone(
            moe_extended_tp=moe_extended_tp,
            encoder_tensor_model_parallel_size=encoder_tensor_model_parallel_size,
            encoder_pipeline_model_parallel_size=encoder_pipeline_model_parallel_size,
            lazy_init=lazy_init,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        refuse_out_of_range(
            pipeline_model_parallel_comm_backend=pipeline_model_parallel_comm_backend,
            megatron_log_level=megatron_log_level,
        )
        if ckpt_load_main_params and ckpt_load_optimizer:
            raise ConfigError(MAIN_PARAMETERS_TWICE, rule="one-source-of-optimizer-state")
        ckpt_load_strictness = strictness_of(ckpt_load_strictness)
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            timeout=collective_timeout(),
        )
        given = locals()
        self.layout = Layout(**{short: given[name] for short, name in LAYOUT_FIELDS.items()})
        self.parallelism = ParallelismConfig(
            **self.layout.fields(),
            pipeline_dtype=pipeline_dtype,
            microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
            num_layers_in_first_pipeline_stage=num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=num_layers_in_last_pipeline_stage,
            account_for_embedding_in_pipeline_split=account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=account_for_loss_in_pipeline_split,
            pipeline_model_parallel_layout=pipeline_model_parallel_layout,
            pipeline_model_parallel_comm_backend=pipeline_model_parallel_comm_backend,
            use_te_rng_tracker=use_te_rng_tracker,
        )
        if pipeline_dtype is not None:
            # The precision plugin follows it; a dataclass without defaults doesn't tell what was set.
            note_explicit_fields(self.parallelism, {"pipeline_dtype": pipeline_dtype})
        self.ddp_config = ddp_config_of(ddp)
        self.explicit_ddp_fields: frozenset[str] = explicit_fields(self.ddp_config)
        """Fields of ``ddp_config`` that the user set; callbacks and precision leave them alone."""
        self.fsdp = fsdp
        if fsdp and pipeline_model_parallel_size > 1:
            raise ConfigError(
                f"strategy.fsdp={fsdp!r} with strategy.pipeline_model_parallel_size={pipeline_model_parallel_size}: "
                "Megatron-FSDP lays its mesh over tensor-, context- and data-parallel ranks only. Set "
                "pipeline_model_parallel_size=1, or leave fsdp unset and shard the optimizer's state "
                "(optim.config.use_distributed_optimizer=True)."
            )
        if fsdp == "megatron":
            turn_on(self.ddp_config, self.explicit_ddp_fields, why="strategy.fsdp='megatron'")
        elif fsdp is not None:
            raise ConfigError(
                f"strategy.fsdp={fsdp!r}: must be 'megatron' or None. For torch's fully_shard use FSDP2Strategy in place of "
                "MegatronStrategy."
            )
        num_distributed_optimizer_instances = one_number_of_instances(
            num_distributed_optimizer_instances, self.ddp_config, self.explicit_ddp_fields
        )
        self._compared = False
        self.data_sampler = data_sampler
        self.restore_config = restore_config
        self.async_save = ckpt_async_save
        self.replace_progress_bar = replace_progress_bar
        self.progress_interval = progress_interval
        self.megatron_parallel: Optional[MegatronParallel] = None
        self.megatron_callbacks = CallbackConnector()
        self._own_names: set[str] = set()
        self._groups: dict[str, Any] = {
            "use_sharp": use_sharp,
            "pipeline_model_parallel_comm_backend": pipeline_model_parallel_comm_backend,
            "num_distributed_optimizer_instances": num_distributed_optimizer_instances,
            "nccl_communicator_config_path": nccl_communicator_config_path
            and str(Path(nccl_communicator_config_path).expanduser()),
            "order": "tp-cp-ep-pp-dp" if use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            "create_gloo_process_groups": use_gloo_process_groups,
        }
        self._use_gloo_process_groups = use_gloo_process_groups
        self._setup_optimizers = setup_optimizers
        self._init_model_parallel = init_model_parallel
        forms: dict[str, Any] = {
            "load_optimizer": ckpt_load_optimizer,
            "save_optimizer": ckpt_save_optimizer,
            "load_main_params": ckpt_load_main_params,
            "part": ckpt_save_part,
        }
        self.form = (
            MegatronFSDPForm(self, **forms)
            if fsdp
            else MegatronForm(
                self, strictness=ckpt_load_strictness, fully_reshardable=ckpt_parallel_save_optim, **forms
            )
        )
        self._megatron_log_level = megatron_log_level
        if fsdp and checkpoint_io is not None and not isinstance(checkpoint_io, TorchCheckpointIO):
            raise ConfigError(
                f"strategy.checkpoint_io={type(checkpoint_io).__name__} with strategy.fsdp={fsdp!r}: parameters that are sharded "
                "over data-parallel ranks are written by TorchCheckpointIO. Leave it unset, or give a subclass."
            )
        if fsdp:
            checkpoint_io = checkpoint_io or TorchCheckpointIO()
        self._checkpoint_io = checkpoint_io or MegatronCheckpointIO(
            save_ckpt_format=save_ckpt_format,  # pyright: ignore[reportArgumentType]  (it checks)
            load_directly_on_device=ckpt_load_directly_on_device,
            async_save=ckpt_async_save,
            torch_dist_multiproc=ckpt_torch_dist_multiproc,
            assume_constant_structure=ckpt_assume_constant_structure,
            parallel_save=ckpt_parallel_save,
            parallel_save_within_dp=ckpt_parallel_save_within_dp,
            parallel_load=ckpt_parallel_load,
        )

    @property
    def decided_ddp_fields(self) -> frozenset[str]:
        """`explicit_ddp_fields`, and what ``fsdp`` decides: Megatron-FSDP's optimizer is the distributed one, whatever the
        optimizer's configuration leaves unset."""
        return self.explicit_ddp_fields | ({"use_distributed_optimizer"} if self.fsdp else frozenset())

    def _check_world(self, world_size: int) -> None:
        super()._check_world(world_size)
        module: Any = self.lightning_module
        has_experts = bool(getattr(getattr(module, "config", None), "num_moe_experts", None))
        problem = unshared(self.layout, world_size, has_experts=has_experts) if self.fsdp else None
        if problem:
            raise ConfigError(f"strategy.fsdp={self.fsdp!r} {problem}")

    # ------------------------------------------------------------------------------------------------------ connecting

    def connect(self, model: pl.LightningModule) -> None:
        """Write sizes, precision and the backend's rules into the model's, the optimizer's and the DDP configuration."""
        super().connect(model)
        self.settle(model)
        self._captures = kind_of(getattr(model, "config", None)) != "none"
        optim = getattr(model, "optim", None)
        if isinstance(optim, OptimizerModule):
            self._register(optim, optim.lr_scheduler)
        if self.replace_progress_bar:
            self._replace_progress_bar(model.trainer)

    def settle(self, model: pl.LightningModule) -> None:
        """Write what `nemo2.settle` says into the configurations of ``model``, of its present optimizer and of the buffers."""
        run = RunSettings(
            parallelism=self.parallelism,
            layout=self.layout,
            ddp_config=self.ddp_config,
            explicit_ddp=self.decided_ddp_fields,
            optimizer_config=getattr(getattr(model, "optim", None), "config", None),
            model_config=getattr(model, "config", None),
            precision=self.precision_plugin,
        )
        settled = settle_run(run, Machine.here())
        settled.apply(run)
        announce(settled.machine_decides)

    def on_train_start(self) -> None:
        """Everything is ready.

        Raises:
            ConfigError: nobody would update the parameters; or as `Checkpoints`.
        """
        super().on_train_start()
        module = self.lightning_module
        if not self._setup_optimizers and module is not None and module.automatic_optimization:
            raise ConfigError(
                f"strategy.setup_optimizers=False: {type(module).__name__} leaves its updates to Lightning, and there is no "
                "optimizer. Set automatic_optimization = False on the module and update its parameters there, or leave "
                "setup_optimizers True."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the first step, after every callback: what runs is what was asked for, or was announced.

        Raises:
            ConfigError: a setting changed, and nobody said so.
        """
        super().on_train_batch_start(batch, batch_idx)
        if not self._compared:
            self._compared = True
            module = self.lightning_module
            optimizer_config = getattr(getattr(module, "optim", None), "config", None)
            refuse_silent_changes(
                {
                    "strategy.ddp_config": self.ddp_config,
                    "optim.config": optimizer_config,
                    "model.config": getattr(module, "config", None),
                }
            )

    # ------------------------------------------------------------------------------------------------------ building

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model``, whoever calls it: what layers look for while they are built is there."""
        start_userbuffers(getattr(self.lightning_module, "config", None), self.data_sampler)
        with super().model_sharded_context():
            yield

    def teardown(self) -> None:
        super().teardown()
        stop_userbuffers()  # after the graphs, which point into them

    def setup(self, trainer: pl.Trainer) -> None:
        """Build and wrap this rank's chunks, make the optimizer, take backward out of Lightning's hands."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.trainer = trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._register(*callbacks, getattr(trainer, "datamodule", None), self.data_sampler, OneSize())
        self.setup_megatron_parallel(trainer, wrap=fitting)
        if fitting:
            self._say_what_is_trained()
            self._take_over_backward(trainer.fit_loop.epoch_loop)
            if self._setup_optimizers:
                self.setup_optimizers(trainer)
        if self.restore_config is not None and not trainer.ckpt_path:
            self.selective_restore()

    def setup_megatron_parallel(self, trainer: pl.Trainer, *, wrap: bool) -> None:
        """Chunks → precision wrapper → DDP buffers; parameters of replica 0 everywhere."""
        assert self.lightning_module is not None
        precision = self.precision_plugin
        if wrap:
            leave_one_bucket(self.ddp_config, say=_log.warning if trainer.is_global_zero else None)
        with adjusting(self.ddp_config, why="Megatron-Core's rule when it makes the buffers"):
            self.megatron_parallel = MegatronParallel(
                self.lightning_module,
                precision_plugin=precision if isinstance(precision, MegatronMixedPrecision) else None,
                callbacks=self.megatron_callbacks,
                vp_size=self.layout.vp if self.layout.pp > 1 else None,
                ddp_config=self.ddp_config if wrap else None,
                device=self.root_device,
                transform=transform_of(self.lightning_module, trainer.callbacks),  # pyright: ignore[reportAttributeAccessIssue]
            )
        self.megatron_parallel.__dict__["use_gloo_process_groups"] = self._use_gloo_process_groups
        self.megatron_parallel.config.timers = timers_of(self._megatron_log_level)  # pyright: ignore[reportAttributeAccessIssue]
        if wrap:
            self.megatron_parallel.broadcast_params()
        self.model = self.megatron_parallel

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Megatron-Core's optimizer from the module's ``optim``; else what its ``configure_optimizers`` returns.

        Raises:
            ConfigError: there is neither, or there are several optimizers.
        """
        assert self.lightning_module is not None and self.megatron_parallel is not None
        optim = getattr(self.lightning_module, "optim", None)
        if isinstance(optim, OptimizerModule):
            optim.schedule_over(trainer.max_steps)
        if isinstance(optim, OptimizerModule) and not optim.makes_torch_optimizers:
            entries = optim(self.lightning_module, self.megatron_parallel)
            if len(entries) != 1:
                raise ConfigError(f"{type(optim).__name__} made {len(entries)} optimizers; a Megatron model takes one.")
            entry = dict(entries[0])
            optimizer = entry.pop("optimizer")
            self.optimizers = [optimizer]
            scheduler_dict = entry.pop("lr_scheduler", entry) or {}
            if "scheduler" in scheduler_dict:
                self.lr_scheduler_configs = [LRSchedulerConfig(**scheduler_dict)]
            if isinstance(optimizer, MegatronOptimizer):
                self.megatron_parallel.config.grad_scale_func = optimizer.scale_loss
                if self.megatron_parallel.graphs is not None:
                    self.megatron_parallel.graphs.optimizers.append(optimizer.mcore_optimizer)
        else:
            self._setup_torch_optimizer(trainer)

    def _setup_torch_optimizer(self, trainer: pl.Trainer) -> None:
        assert self.megatron_parallel is not None
        hint = "Give the module `optim=MegatronOptimizerModule(...)`"
        if getattr(self.megatron_parallel.config, "fp16", False):
            raise ConfigError(
                "trainer.plugins.precision='16-mixed' needs an optimizer that scales the loss, and this module brings a torch "
                f"optimizer: its small gradients would vanish. {hint}, or use 'bf16-mixed'."
            )
        cut = [
            name
            for name, parameter in self.megatron_parallel.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        ]
        if self.layout.pp > 1 or (self.layout.tp > 1 and cut):
            raise ConfigError(
                f"This module brings a torch optimizer, which knows nothing of parameters that are sharded over ranks "
                f"({self.layout.describe()}): neither its clipping nor its checkpoints would be right. {hint}."
            )
        if self.ddp_config.use_distributed_optimizer:
            raise ConfigError(
                "strategy.ddp_config.use_distributed_optimizer=True shards the state of Megatron-Core's optimizer, and this "
                "module brings its own: set it to False, or give the module `optim=MegatronOptimizerModule(...)`."
            )
        super(DDPStrategy, self).setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; MegatronStrategy steps one. Give the module "
                "`optim=MegatronOptimizerModule(...)`, or return a single optimizer."
            )
