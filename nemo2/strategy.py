# SPDX-License-Identifier: Apache-2.0
"""`MegatronStrategy`: Lightning's hooks mapped onto Megatron-Core.

What happens, in Lightning's order:

    connect              the parallel sizes, the precision and the backend's rules go into the model's configuration
    setup_environment    device, process group, Megatron-Core's groups, random streams
    setup                chunks built and wrapped (`MegatronParallel`), optimizer, the loop told that backward is not its job
    training_step        gradients zeroed, the schedule runs forward and backward over this rank's share of a global batch
    optimizer_step       Megatron-Core's optimizer, metrics on the steps that log
    save / load          sharded state through `MegatronCheckpointIO`
"""

import importlib.metadata
import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from nemo2.backend import get_backend
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.context import write_context
from nemo2.checkpoint.directory import Manifest, ckpt_to_dir
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.random_state import load_random_state, random_state
from nemo2.config.capture import configurable
from nemo2.config.explicit import explicit_fields
from nemo2.errors import CheckpointError, ConfigError
from nemo2.names import did_you_mean
from nemo2.optim.base import OptimizerModule
from nemo2.optim.megatron import MegatronOptimizer
from nemo2.parallel.groups import destroy_model_parallel, initialize_model_parallel, seed_random_streams
from nemo2.parallel.hooks import CallbackConnector
from nemo2.parallel.layout import Layout, ParallelismConfig
from nemo2.parallel.megatron_parallel import MegatronParallel
from nemo2.precision import MegatronMixedPrecision
from nemo2.run_dir.progress import ProgressPrinter, make_progress

_log = logging.getLogger(__name__)
DEFAULT_SEED = 1234
"""Megatron-LM's default; ``lightning.seed_everything`` sets another."""


@configurable(ddp_config="ddp")
class MegatronStrategy(DDPStrategy):
    """Train with Megatron-Core's parallelisms under Lightning.

    Parameters are NeMo 2.0's; the sizes have the defaults "not cut". ``ddp_config`` is a second spelling of ``ddp``.

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
        pipeline_dtype: Of what stages send each other. None: the precision plugin's.
        pipeline_model_parallel_comm_backend: "nccl" or "ucc". None: the backend of the world.
        ddp: "megatron" or a ``DistributedDataParallelConfig``: buckets, overlap, the distributed optimizer.
        num_distributed_optimizer_instances: Replicas of the sharded optimizer state.
        use_tp_pp_dp_mapping: Number ranks tensor, pipeline, data (else tensor, context, expert, data, pipeline).
        nccl_communicator_config_path: YAML with NCCL settings per group, for Megatron-Core.
        use_sharp: Let the switch reduce for the data-parallel groups.
        use_gloo_process_groups: Also make gloo groups, for the optimizer's checkpoints.
        data_sampler: Cuts batches. None: the data module's ``data_sampler``.
        parallel_devices, cluster_environment, checkpoint_io: As Lightning's DDPStrategy.
        find_unused_parameters: Has no meaning for Megatron-Core's gradient buffers: False.
        ckpt_load_optimizer, ckpt_save_optimizer: Whether optimizer state takes part.
        ckpt_load_main_params: Load the optimizer's fp32 parameters into the model. Not with ``ckpt_load_optimizer``.
        save_ckpt_format: "torch_dist".
        ckpt_async_save: Write checkpoints in the background.
        ckpt_torch_dist_multiproc: Writer processes per rank. None: Megatron-Core's choice.
        ckpt_assume_constant_structure, ckpt_parallel_save, ckpt_parallel_save_within_dp, ckpt_parallel_load: See
            `MegatronCheckpointIO`.
        ckpt_parallel_save_optim: Save the optimizer's state so that any layout can load it; False: faster, for the same
            model-parallel layout only.
        ckpt_load_directly_on_device: Kept for NeMo's signature.
        ckpt_load_strictness: Megatron-Core's ``StrictHandling`` by name. None: unexpected keys are ignored, missing ones
            are errors.
        restore_config: Weights to start from, when no checkpoint is resumed.
        setup_optimizers: False: no optimizer is made (the module does its own updates).
        init_model_parallel: False: somebody else has made Megatron-Core's groups.
        lazy_init: Must be False; the rehearsal builds models without memory.
        use_te_rng_tracker: Transformer Engine's random-stream tracker, for CUDA graphs.
        replace_progress_bar, progress_interval: Our progress line or bar in place of Lightning's, every so many steps.
        megatron_log_level: 0 to 2: which of Megatron-Core's timers run.
        fsdp: Must be None.
        moe_extended_tp, encoder_tensor_model_parallel_size, encoder_pipeline_model_parallel_size: Gone from Megatron-Core;
            any value but the default is an error that says what to use.

    Raises:
        ConfigError: a value that can't work, or that Megatron-Core no longer has.
    """

    trainer: pl.Trainer

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
        ckpt_load_strictness: Optional[str] = None,
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
    ) -> None:
        _refuse_what_is_gone(
            moe_extended_tp=moe_extended_tp,
            encoder_tensor_model_parallel_size=encoder_tensor_model_parallel_size,
            encoder_pipeline_model_parallel_size=encoder_pipeline_model_parallel_size,
            fsdp=fsdp,
            lazy_init=lazy_init,
            find_unused_parameters=find_unused_parameters,
        )
        if ckpt_load_main_params and ckpt_load_optimizer:
            raise ConfigError(
                "strategy.ckpt_load_main_params=True and strategy.ckpt_load_optimizer=True: the optimizer's state holds the "
                "main parameters already. Set one of them to False."
            )
        if ckpt_load_strictness is not None and ckpt_load_strictness not in (
            known := [item.value for item in StrictHandling]
        ):
            raise ConfigError(
                f"strategy.ckpt_load_strictness={ckpt_load_strictness!r}: must be one of {', '.join(known)}, or None"
                f"{did_you_mean(ckpt_load_strictness, known)}."
            )
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            timeout=_timeout(),
        )
        self.layout = Layout(
            tp=tensor_model_parallel_size,
            pp=pipeline_model_parallel_size,
            vp=virtual_pipeline_model_parallel_size,
            cp=context_parallel_size,
            ep=expert_model_parallel_size,
            etp=expert_tensor_parallel_size,
            sp=sequence_parallel,
        )
        self.parallelism = ParallelismConfig(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            context_parallel_size=context_parallel_size,
            sequence_parallel=sequence_parallel,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
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
        self.ddp_config = _ddp_config(ddp)
        self.explicit_ddp_fields: frozenset[str] = explicit_fields(self.ddp_config)
        """What the user set in ``ddp_config``; callbacks and precision leave these alone."""
        self.ddp_config.num_distributed_optimizer_instances = num_distributed_optimizer_instances
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
            "nccl_communicator_config_path": nccl_communicator_config_path,
            "order": "tp-cp-ep-pp-dp" if use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            "create_gloo_process_groups": use_gloo_process_groups,
        }
        self._use_gloo_process_groups = use_gloo_process_groups
        self._make_optimizers = setup_optimizers
        self._make_groups = init_model_parallel
        self._load_optimizer = ckpt_load_optimizer
        self._save_optimizer = ckpt_save_optimizer
        self._load_main_params = ckpt_load_main_params
        self._strictness = ckpt_load_strictness
        self._megatron_log_level = megatron_log_level
        self._fully_reshardable = ckpt_parallel_save_optim
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

    # ------------------------------------------------------------------------------------------------------ connecting

    def connect(self, model: pl.LightningModule) -> None:
        """Write sizes, precision and the backend's rules into the model's, the optimizer's and the DDP configuration."""
        super().connect(model)
        _refuse_what_the_step_does_itself(model.trainer)
        optim = getattr(model, "optim", None)
        optimizer_config = getattr(optim, "config", None)
        self._align_distributed_optimizer(optimizer_config)
        precision = self.precision_plugin
        if isinstance(precision, MegatronMixedPrecision):
            precision.apply_to(self.ddp_config, path="strategy.ddp_config")
            if optimizer_config is not None:
                precision.apply_to(optimizer_config, path="optim.config")
            if self.parallelism.pipeline_dtype is None:
                self.parallelism.pipeline_dtype = precision.dtype_config.pipeline_dtype
            self._leave_overflows_to_the_scaler(precision)
        config = getattr(model, "config", None)
        if isinstance(config, TransformerConfig):
            if isinstance(precision, MegatronMixedPrecision):
                precision.apply_to(config, path="model.config")
            self._write_parallelism(config)
            _keep_gradients_in_fp32(config)
        if isinstance(optim, OptimizerModule):
            self._register(optim, optim.lr_scheduler)
        if self.replace_progress_bar:
            self._replace_progress_bar(model.trainer)

    def _leave_overflows_to_the_scaler(self, precision: MegatronMixedPrecision) -> None:
        """With dynamic loss scaling, infinite gradients are how the scale is found (Megatron-LM's arguments.py does so too)."""
        dtypes = precision.dtype_config
        if dtypes.fp16 and dtypes.loss_scale is None and self.ddp_config.check_for_nan_in_grad:
            self.ddp_config.check_for_nan_in_grad = False
            _log.info(
                "strategy.ddp_config.check_for_nan_in_grad is off: under fp16's dynamic loss scaling the scaler handles "
                "gradients that aren't finite (trainer.plugins.fp16_loss_scale=... makes the scale static)."
            )

    def _write_parallelism(self, config: TransformerConfig) -> None:
        """The strategy's sizes are the model's: a model can't be cut one way and run another.

        Raises:
            ConfigError: the user set the model's own field to something else.
        """
        explicit = explicit_fields(config)
        for field in fields(self.parallelism):
            value = getattr(self.parallelism, field.name)
            if not hasattr(config, field.name):
                continue
            current = getattr(config, field.name)
            if field.name in explicit and current not in (value, None):
                raise ConfigError(
                    f"model.config.{field.name}={current} contradicts strategy.{field.name}={value}: parallel sizes are set on "
                    "the strategy, which writes them into the model. Remove model.config's."
                )
            setattr(config, field.name, value)
        if config.pipeline_model_parallel_size == 1:
            config.pipeline_dtype = None  # pyright: ignore[reportAttributeAccessIssue]
            config.virtual_pipeline_model_parallel_size = None
        if config.microbatch_group_size_per_vp_stage is None:
            config.microbatch_group_size_per_vp_stage = config.pipeline_model_parallel_size
        self._order_messages(config, explicit)
        # Derived fields and Megatron-Core's own checks, for the sizes it now has.
        try:
            config.__post_init__()
        except (ValueError, AssertionError) as error:
            raise ConfigError(
                f"Megatron-Core refuses this model and layout ({self.layout.describe()}): {error}"
            ) from error

    def _replace_progress_bar(self, trainer: pl.Trainer) -> None:
        """Our bar or line where Lightning put its default; a bar of the user's own stays."""
        bar = trainer.progress_bar_callback
        if type(bar) not in (TQDMProgressBar, RichProgressBar):
            return
        progress = make_progress(trainer)
        if isinstance(progress, ProgressPrinter):
            progress = ProgressPrinter(log_interval=self.progress_interval)
        trainer.callbacks[trainer.callbacks.index(bar)] = progress  # pyright: ignore[reportAttributeAccessIssue]

    def _order_messages(self, config: TransformerConfig, explicit: frozenset[str]) -> None:
        """Two interleaved stages exchange messages right only when these overlap: otherwise each rank posts two sends to
        the same peer in an order that the peer doesn't expect, and trains on the wrong activations without a word
        (Megatron-LM's arguments.py refuses it for this reason; the core alone does not).
        """
        if self.layout.pp != 2 or not self.layout.vp or self.layout.vp == 1 or config.overlap_p2p_comm:
            return
        if "overlap_p2p_comm" in explicit:
            raise ConfigError(
                f"model.config.overlap_p2p_comm=False with strategy.virtual_pipeline_model_parallel_size={self.layout.vp} and "
                "pipeline_model_parallel_size=2: two interleaved stages need overlapped messages. Set it to True, unset it, "
                "or use more stages."
            )
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False

    def _align_distributed_optimizer(self, optimizer_config: Any) -> None:
        """One switch in two configurations: whichever was set explicitly decides for both."""
        if optimizer_config is None:
            return
        theirs = "use_distributed_optimizer" in explicit_fields(optimizer_config)
        ours = "use_distributed_optimizer" in self.explicit_ddp_fields
        optimizer, ddp = optimizer_config.use_distributed_optimizer, self.ddp_config.use_distributed_optimizer
        if theirs and ours and optimizer != ddp:
            raise ConfigError(
                f"optim.config.use_distributed_optimizer={optimizer} contradicts strategy.ddp_config.use_distributed_optimizer="
                f"{ddp}: it is one switch. Remove one of them, or make them agree."
            )
        value = ddp if ours and not theirs else optimizer
        optimizer_config.use_distributed_optimizer = self.ddp_config.use_distributed_optimizer = value
        if not value and self.ddp_config.overlap_param_gather:
            if "overlap_param_gather" in self.explicit_ddp_fields:
                raise ConfigError(
                    "strategy.ddp_config.overlap_param_gather=True needs the distributed optimizer, whose parameters it gathers: "
                    "set optim.config.use_distributed_optimizer=True, or overlap_param_gather=False."
                )
            self.ddp_config.overlap_param_gather = False

    # ------------------------------------------------------------------------------------------------------ environment

    def _configure_launcher(self) -> None:
        """One process launches nobody. With Lightning's launcher, which starts the script anew, it could not run in a
        notebook."""
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Device, world, Megatron-Core's groups, random streams, the batch calculator."""
        world_size = self.num_nodes * self.num_processes
        self._check_world(world_size)
        if isinstance(self.precision_plugin, MegatronMixedPrecision):
            self.precision_plugin.check_hardware()
        backend = get_backend()
        backend.install()
        backend.set_device(self.local_rank)
        super().setup_environment()
        if self._make_groups:
            if getattr(self, "_grouped", self.layout) != self.layout:
                destroy_model_parallel()
            initialize_model_parallel(self.layout, timeout=self._timeout, **self._groups)
            self._grouped = self.layout
        self._connect_data_sampler()
        seed_random_streams(_seed(), te_rng_tracker=self.parallelism.use_te_rng_tracker)

    def _check_world(self, world_size: int) -> None:
        """Refuse, before any process group, a world that the layout can't be laid over or that wasn't launched."""
        launched = int(os.environ.get("WORLD_SIZE", world_size))
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally and launched != world_size:
            raise ConfigError(
                f"trainer.num_nodes * trainer.devices = {self.num_nodes} * {self.num_processes} = {world_size}, and the launcher "
                f"started {launched} process{'es' if launched > 1 else ''}: set trainer.devices and trainer.num_nodes to what is "
                "launched, or launch that many (`--devices`, ntasks_per_node)."
            )
        self.layout.data_parallel_size(world_size)

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or get_backend().process_group_backend

    def _connect_data_sampler(self) -> None:
        trainer = self._trainer_of_module()
        datamodule = getattr(trainer, "datamodule", None)
        self.data_sampler = self.data_sampler or getattr(datamodule, "data_sampler", None)
        if self.data_sampler is None:
            return
        self.data_sampler.connect(trainer)
        self.data_sampler.setup(self.cluster_environment.global_rank())  # pyright: ignore[reportOptionalMemberAccess]
        # Our sampler knows the data-parallel ranks; Lightning's would cut by global rank.
        trainer._accelerator_connector.use_distributed_sampler = False

    def _trainer_of_module(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For plain loaders that Lightning cuts: replicas are the data-parallel ones."""
        from megatron.core import parallel_state

        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.data_sampler is None:
            _warn_of_equal_data(dataloader, self.trainer)
            return _with_own_generator(dataloader)
        stage = str(getattr(self.trainer.state.stage, "value", "") or "")
        mode = {"train": "train", "validate": "validation", "sanity_check": "validation", "test": "test"}.get(
            stage, "train"
        )
        mode = getattr(dataloader, "mode", mode)
        loader = self.data_sampler.transform_dataloader(dataloader, consumed_samples=self.consumed_samples, mode=mode)
        return _with_own_generator(loader)

    @property
    def consumed_samples(self) -> int:
        """Samples that training has consumed, those before a resume included; 0 without a Megatron data sampler."""
        return self.data_sampler.consumed_samples if self.data_sampler is not None else 0

    # ------------------------------------------------------------------------------------------------------ building

    def setup(self, trainer: pl.Trainer) -> None:
        """Build and wrap this rank's chunks, make the optimizer, take backward out of Lightning's hands."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.trainer = trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._register(*callbacks, getattr(trainer, "datamodule", None), self.data_sampler)
        self.setup_megatron_parallel(trainer, wrap=fitting)
        if fitting:
            self._take_over_backward(trainer.fit_loop.epoch_loop)
            if self._make_optimizers:
                self.setup_optimizers(trainer)
        if self.restore_config is not None and not trainer.ckpt_path:
            self.selective_restore()

    def setup_megatron_parallel(self, trainer: pl.Trainer, *, wrap: bool) -> None:
        """Chunks → precision wrapper → DDP buffers; parameters of replica 0 everywhere."""
        assert self.lightning_module is not None
        precision = self.precision_plugin
        self.megatron_parallel = MegatronParallel(
            self.lightning_module,
            precision_plugin=precision if isinstance(precision, MegatronMixedPrecision) else None,
            callbacks=self.megatron_callbacks,
            vp_size=self.layout.vp if self.layout.pp > 1 else None,
            ddp_config=self.ddp_config if wrap else None,
            device=self.root_device,
        )
        self.megatron_parallel.__dict__["use_gloo_process_groups"] = self._use_gloo_process_groups
        self.megatron_parallel.config.timers = _timers(self._megatron_log_level)  # pyright: ignore[reportAttributeAccessIssue]
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
            scheduler = optim.lr_scheduler
            if scheduler is not None and getattr(scheduler, "max_steps", None) is None and trainer.max_steps > 0:
                scheduler.max_steps = trainer.max_steps
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
                f"This module brings a torch optimizer, which knows nothing of parameters that are cut over ranks "
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

    def _take_over_backward(self, loop: _TrainingEpochLoop) -> None:
        # The schedule runs forward and backward in one go: Lightning's own zero_grad would wipe the gradients out.
        loop.automatic_optimization._skip_backward = True

    def _register(self, *objects: Any) -> None:
        self.megatron_callbacks.add(*(item for item in objects if item is not None))

    @contextmanager
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Generator[None, None, None]:
        """Megatron-Core places its own parameters."""
        yield

    def model_to_device(self) -> None:
        """The chunks were put on the device before they were wrapped."""

    def batch_to_device(self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0) -> Any:
        """A step's share stays where it is: the data step moves one micro-batch at a time."""
        return batch

    # ------------------------------------------------------------------------------------------------------ stepping

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Micro-batches are the accumulation."""
        return True

    def training_step(self, batch: Any, batch_idx: Optional[int] = None, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward over this rank's share of a global batch. Returns the reduced loss."""
        assert self.megatron_parallel is not None
        self.megatron_parallel.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.megatron_parallel.training_step(
            batch, step_i=self.trainer.global_step, **self._batch_shape("train")
        )
        self._last_loss = loss
        return loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The closure runs the step's forward and backward; then the update, then what is logged."""
        loss = closure()
        trainer = self.trainer
        _call_hooks(trainer, "on_after_backward")
        _call_hooks(trainer, "on_before_optimizer_step", optimizer)
        if not isinstance(optimizer, MegatronOptimizer):
            _give_gradients(optimizer)
        optimizer.step()
        self._log_step(optimizer)
        return loss

    def _log_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Metrics under NeMo's names, on the steps that Lightning logs; the others cost nothing."""
        trainer, module = self.trainer, self.lightning_module
        step = trainer.global_step + 1
        if module is None or (
            step % max(1, trainer.log_every_n_steps)  # pyright: ignore[reportAttributeAccessIssue]
            and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ):
            return
        metrics: dict[str, Any] = {
            "reduced_train_loss": self._last_loss.float(),
            "global_step": float(trainer.global_step),
            "step": float(trainer.global_step),
            "lr": float(optimizer.param_groups[0]["lr"]),
        }
        if isinstance(optimizer, MegatronOptimizer):
            if optimizer.grad_norm is not None:
                metrics["grad_norm"] = float(optimizer.grad_norm)
            if optimizer.num_zeros_in_grad is not None:
                metrics["num_zeros_in_grad"] = float(optimizer.num_zeros_in_grad)
            if optimizer.config.fp16:
                metrics["loss_scale"] = float(optimizer.mcore_optimizer.get_loss_scale())
        if self.data_sampler is not None and getattr(self.data_sampler, "output_log", True):
            size = self.data_sampler.current_global_batch_size
            metrics |= {"consumed_samples": float(self.consumed_samples + size), "global_batch_size": float(size)}
        for name, value in metrics.items():
            module.log(name, value, prog_bar=name in ("reduced_train_loss", "lr"), batch_size=1)

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Optional[Tensor]:
        """Reduced loss of one global batch, None if the module's step returns none; logged as ``val_loss``, the mean over
        batches."""
        assert self.megatron_parallel is not None and self.lightning_module is not None
        loss = self.megatron_parallel.validation_step(
            batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval")
        )
        self._log_unless_the_module_did("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Optional[Tensor]:
        assert self.megatron_parallel is not None and self.lightning_module is not None
        loss = self.megatron_parallel.test_step(batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval"))
        self._log_unless_the_module_did("test_loss", loss)
        return loss

    def _log_unless_the_module_did(self, name: str, loss: Optional[Tensor], **options: Any) -> None:
        """The mean over batches under ``name``, if there is one and the module's own step hasn't logged it: Lightning
        refuses a second."""
        assert self.lightning_module is not None
        if loss is None:
            return
        key = f"{self.lightning_module._current_fx_name}.{name}"
        if name not in self._own_names and key in (self.trainer._results or {}):
            return
        self._own_names.add(name)
        self.lightning_module.log(name, loss, on_step=False, on_epoch=True, batch_size=1, **options)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """What the module's ``predict_step`` (or ``forward_step``) gave: tensors of several micro-batches concatenated, others
        in a list. None on ranks that don't hold the last pipeline stage."""
        assert self.megatron_parallel is not None
        return self.megatron_parallel.predict_step(batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval"))

    def _batch_shape(self, stage: Literal["train", "eval"]) -> dict[str, int]:
        """Micro-batches and their shape, from the data sampler; without one a loader's item is one micro-batch."""
        sampler = self.data_sampler
        if sampler is None:
            return {}
        if stage == "train":
            sampler.update_num_microbatches()
            num_microbatches = sampler.num_microbatches
        else:
            num_microbatches = sampler.global_batch_size // (sampler.micro_batch_size * _data_parallel_size())
        shape = {"num_microbatches": num_microbatches, "micro_batch_size": sampler.micro_batch_size}
        shape["seq_length"] = sampler.seq_len
        if sampler.decoder_seq_len is not None:
            shape["decoder_seq_length"] = sampler.decoder_seq_len
        return shape

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Publish a background save that has finished meanwhile."""
        if self.async_save and isinstance(self.checkpoint_io, MegatronCheckpointIO):
            self.checkpoint_io.maybe_finalize_save_checkpoint(blocking=False)

    def on_validation_start(self) -> None:
        if self.megatron_parallel is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.megatron_parallel.pause_param_gather()

    def on_validation_end(self) -> None:
        if self.megatron_parallel is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.megatron_parallel.resume_param_gather()
            # Lightning puts all chunks into evaluation mode, and the modules it knows, those of the first, back.
            for chunk in list(self.megatron_parallel)[1:]:
                chunk.train()

    def on_train_end(self) -> None:
        if self.megatron_parallel is not None:
            self.megatron_parallel.force_param_sync()

    # ------------------------------------------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        assert self._checkpoint_io is not None
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """State is loaded into chunks that are built, wrapped and cut."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Megatron-Core's optimizer is loaded with the model, in `load_model_state_dict`; a torch optimizer by Lightning."""
        return self._load_optimizer and any(not isinstance(opt, MegatronOptimizer) for opt in self.optimizers)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's own dump stays free of tensors; `save_checkpoint` adds the sharded ones."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return (
            {} if isinstance(getattr(optimizer, "_optimizer", optimizer), MegatronOptimizer) else optimizer.state_dict()
        )

    @property
    def sharded_state_dict_metadata(self) -> dict[str, Any]:
        """How Megatron-Core cuts the optimizer's state: so that any layout can read it, or only the same one."""
        kind = "fully_reshardable" if self._fully_reshardable else "dp_reshardable"
        return {
            "distrib_optim_sharding_type": kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, Path], storage_options: Optional[dict[str, Any]] = None
    ) -> None:
        """Save Lightning's ``checkpoint`` with the model's and the optimizer's shards. Every rank calls it.

        ``storage_options``: ``published``, ``metrics`` and ``with_context``, see `ModelCheckpoint.save`.
        """
        assert self.megatron_parallel is not None
        options = storage_options or {}
        self.megatron_parallel.force_param_sync()
        metadata = self.sharded_state_dict_metadata
        weights_only = "optimizer_states" not in checkpoint
        state: dict[str, Any] = {key: value for key, value in checkpoint.items() if key not in ("state_dict",)}
        model_state = self.megatron_parallel.sharded_state_dict(metadata=metadata)
        state["model"] = model_state
        if not weights_only:
            state.update(self._optimizer_shards(model_state, metadata, loading=False))
            state["random_state"] = random_state()
        state["nemo2"] = {"consumed_samples": self.consumed_samples, "global_step": self.trainer.global_step}
        manifest = Manifest(
            step=self.trainer.global_step,
            consumed_samples=self.consumed_samples,
            layout=self._layout_record(),
            metrics=options.get("metrics") or {},
            weights_only=weights_only or not self._save_optimizer,
            versions=_versions(),
        )
        with_context = options.get("with_context", True)
        self.checkpoint_io.save_checkpoint(
            state,
            ckpt_to_dir(filepath),
            storage_options={
                "manifest": manifest,
                "content_metadata": metadata,
                "write_context": (lambda path: write_context(path, self.trainer)) if with_context else None,
                "published": options.get("published"),
            },
        )

    def _layout_record(self) -> dict[str, Any]:
        record = {field.name: getattr(self.layout, field.name) for field in fields(self.layout)}
        return record | {"world_size": self.num_nodes * self.num_processes}

    def _optimizer_shards(
        self, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
    ) -> dict[str, Any]:
        wanted = self._load_optimizer if loading else self._save_optimizer
        optimizers = [opt for opt in self.optimizers if isinstance(opt, MegatronOptimizer)]
        if not wanted or not optimizers:
            return {}
        return {"optimizer": optimizers[0].sharded_state_dict(model_state, is_loading=loading, metadata=dict(metadata))}

    def load_checkpoint(self, checkpoint_path: Union[str, Path], weights_only: Optional[bool] = None) -> dict[str, Any]:
        """Read a checkpoint into this rank's cut of the model and, when fitting, of the optimizer."""
        return self._read(Path(checkpoint_path), optimizer=self.trainer.state.fn == TrainerFn.FITTING)

    def _read(self, path: Path, *, optimizer: bool, model: bool = True) -> dict[str, Any]:
        from nemo2.checkpoint.directory import read_manifest

        assert self.megatron_parallel is not None
        io: Any = self.checkpoint_io
        if not isinstance(io, MegatronCheckpointIO):
            return io.load_checkpoint(path)
        io.check(path)
        metadata = io.load_content_metadata(path) or self.sharded_state_dict_metadata
        manifest = read_manifest(path)
        wanted: dict[str, Any] = {}
        model_state = self.megatron_parallel.sharded_state_dict(metadata=metadata)
        if model:
            wanted["model"] = model_state
        if optimizer and not (manifest is not None and manifest.weights_only):
            wanted.update(self._optimizer_shards(model_state, metadata, loading=True))
            same_layout = manifest is not None and manifest.layout == self._layout_record()
            if same_layout:
                wanted["random_state"] = random_state()
            elif manifest is not None:
                _log.info("The layout has changed since %s was saved: random streams start anew.", path)
        loaded = io.load_checkpoint(path, sharded_state_dict=wanted, strict=self._strictness)
        for part in ("model", "optimizer", "random_state"):
            if part not in wanted:
                loaded.pop(part, None)  # its plain data come unasked, without the tensors
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load chunks, optimizer, random streams and the position in the data from what `load_checkpoint` read."""
        assert self.megatron_parallel is not None
        if "model" in checkpoint:
            self.megatron_parallel.load_chunks_state_dict(checkpoint["model"], strict=strict)
        optimizers = [opt for opt in self.optimizers if isinstance(opt, MegatronOptimizer)]
        if "optimizer" in checkpoint and optimizers:
            optimizers[0].load_state_dict(checkpoint["optimizer"])
        elif optimizers:
            optimizers[0].reload_model_params()
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if "random_state" in checkpoint:
            load_random_state(checkpoint["random_state"])
        position = checkpoint.get("nemo2")
        if position is not None and self.data_sampler is not None and self.trainer.ckpt_path:
            self.data_sampler.load_state_dict(position)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Only called for torch optimizers, see `lightning_restore_optimizer`."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not isinstance(optimizer, MegatronOptimizer):
                optimizer.load_state_dict(state)

    def selective_restore(self) -> None:
        """Start from the weights (and, if asked, the optimizer state) of ``restore_config``.

        Raises:
            CheckpointError: that checkpoint can't be read.
        """
        assert self.restore_config is not None
        path = Path(self.restore_config.path)
        if not path.exists():
            raise CheckpointError(
                f"resume.restore_config.path={self.restore_config.path}: no such checkpoint directory."
            )
        loaded = self._read(
            path, optimizer=self.restore_config.load_optim_state, model=self.restore_config.load_model_state
        )
        kept = {key: value for key, value in loaded.items() if key in ("model", "optimizer")}
        self.load_model_state_dict(kept, strict=True)
        _log.info("Started from the weights of %s.", path)

    def remove_checkpoint(self, filepath: Union[str, Path]) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(ckpt_to_dir(filepath))

    # ------------------------------------------------------------------------------------------------------ the end

    def on_exception(self, exception: BaseException) -> None:
        """Give background saves up: finishing them takes all ranks, and this one may be the only one that failed. What they
        have written carries no checkpoint's name."""
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and self.world_size > 1:
            io.abandon()

    def teardown(self) -> None:
        """Finish background saves. The groups stay, so that the model can be used; another layout replaces them."""
        self.checkpoint_io.teardown()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()


def _refuse_what_is_gone(**arguments: Any) -> None:
    """An error for each argument whose meaning Megatron-Core has dropped, or that nemo2 has another way for."""
    why = {
        "moe_extended_tp": "Megatron-Core has dropped it; cut experts with expert_tensor_parallel_size",
        "encoder_tensor_model_parallel_size": "Megatron-Core has dropped encoder-decoder layouts; leave it unset",
        "encoder_pipeline_model_parallel_size": "Megatron-Core has dropped encoder-decoder layouts; leave it unset",
        "fsdp": "this version shards the optimizer's state only (optim.config.use_distributed_optimizer=True)",
        "lazy_init": "models are built once, in their place; leave it unset",
        "find_unused_parameters": "Megatron-Core's gradient buffers reduce every parameter, used or not; leave it unset",
    }
    problems = [f"strategy.{name}={arguments[name]!r}: {reason}." for name, reason in why.items() if arguments[name]]
    if problems:
        raise ConfigError(" ".join(problems))


def _refuse_what_the_step_does_itself(trainer: pl.Trainer) -> None:
    """Lightning's own clipping and accumulation would have no effect.

    Raises:
        ConfigError: they were asked for.
    """
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: Megatron-Core clips inside its optimizer step. Set "
            f"optim.config.clip_grad={trainer.gradient_clip_val} and leave trainer.gradient_clip_val unset."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: with MegatronStrategy a step's micro-batches "
            "are the accumulation. Raise data.global_batch_size, and leave accumulate_grad_batches at 1."
        )


def _keep_gradients_in_fp32(config: TransformerConfig) -> None:
    """Megatron-Core's fused cross-entropy returns its gradient in bf16, whatever the model's dtype (calculate_gradients in
    fusions/fused_cross_entropy.py): not in a model that was asked to be fp32, unless the user turned it on."""
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    if fused and config.params_dtype is torch.float32 and "cross_entropy_loss_fusion" not in explicit_fields(config):
        config.cross_entropy_loss_fusion = False


def _ddp_config(ddp: Any) -> DistributedDataParallelConfig:
    if isinstance(ddp, DistributedDataParallelConfig):
        return ddp
    if ddp == "megatron":
        # NeMo's default; gradients that aren't finite stop the run where they arise.
        return DistributedDataParallelConfig(check_for_nan_in_grad=True)
    if ddp == "pytorch":
        raise ConfigError(
            "strategy.ddp='pytorch': Megatron-Core's optimizer needs Megatron-Core's gradient buffers. Use 'megatron' or a "
            "DistributedDataParallelConfig here; for a model without Megatron parallelism use Lightning's strategy='ddp'."
        )
    raise ConfigError(
        f"strategy.ddp={ddp!r}: must be 'megatron' or a DistributedDataParallelConfig, not {type(ddp).__name__}."
    )


def _timeout() -> timedelta:
    """How long a collective may take: NeMo's environment variable, else torch's 30 minutes."""
    seconds = os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    return timedelta(seconds=int(seconds)) if seconds else timedelta(minutes=30)


def _timers(log_level: int) -> Any:
    if log_level == 0:
        return None
    from megatron.core import Timers

    return Timers(log_level=log_level, log_option="minmax")


def _data_parallel_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_world_size()


def _with_own_generator(dataloader: Any) -> Any:
    """A loader draws a number each time it is iterated. On a CPU torch's own generator feeds dropout too, and a resumed run
    iterates at other steps than an uninterrupted one."""
    if isinstance(dataloader, DataLoader) and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(_seed())
    return dataloader


def _warn_of_equal_data(dataloader: Any, trainer: pl.Trainer) -> None:
    """Without a data sampler and with Lightning's switched off, nobody cuts a plain loader."""
    plain = isinstance(dataloader, DataLoader) and isinstance(dataloader.sampler, (SequentialSampler, RandomSampler))
    if plain and not trainer._accelerator_connector.use_distributed_sampler and _data_parallel_size() > 1:
        _log.warning(
            "trainer.use_distributed_sampler=False, and the data has neither a data_sampler nor a distributed sampler: all %d "
            "data-parallel replicas train on the same samples. Set trainer.use_distributed_sampler=True, or give the data "
            "module a MegatronDataSampler.",
            _data_parallel_size(),
        )


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))


def _batch_idx(args: tuple, kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("batch_idx", args[0] if args else 0) or 0)


def _call_hooks(trainer: pl.Trainer, name: str, *arguments: Any) -> None:
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, name, *arguments)
    call._call_lightning_module_hook(trainer, name, *arguments)


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Megatron-Core gathers gradients in buffers of its own; a torch optimizer looks for them in ``.grad``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("nemo2", "megatron-core", "torch", "lightning")}
