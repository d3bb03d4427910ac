# SPDX-License-Identifier: Apache-2.0
"""`MegatronStrategy`: maps Lightning's hooks onto Megatron-Core.

The hooks, in Lightning's order, of which `nemo2.training.strategies.base` holds those that all strategies share:

    connect              writes parallel sizes, precision and the backend's rules into the model's configuration (`settle`)
    setup_environment    device, process group, Megatron-Core's groups, random-number streams
    setup                builds and wraps the chunks (`setup_megatron_parallel`), makes the optimizer, takes over backward
    optimizer_step       `training_step` zeroes gradients and runs the schedule over this rank's micro-batches; then
                         Megatron-Core's optimizer, and metrics on the steps that log
    save / load          sharded state through `MegatronCheckpointIO`
    teardown             finishes saves, frees CUDA graphs and userbuffers

`nemo2.mcore.settle` decides which values go into which configuration. `nemo2.training.strategies.megatron_config`
checks the arguments.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from megatron.core.distributed import DistributedDataParallelConfig

from nemo2.base.errors import ConfigError
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.forms.form import Part
from nemo2.checkpoint.forms.megatron import MegatronForm
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.config.capture import configurable
from nemo2.config.notices import announce_machine_settings
from nemo2.config.provenance import adjusting
from nemo2.config.requested import refuse_silent_changes
from nemo2.data.sampler import DataSampler
from nemo2.mcore.optim.megatron import MegatronOptimizer
from nemo2.mcore.parallel.layout import LAYOUT_FIELDS, Layout, ParallelismConfig, rank_order
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.run_settings import DDP, MODEL, OPTIM, RunSettings
from nemo2.mcore.settle.settling import leave_one_bucket, settle_run
from nemo2.training.strategies.base import BaseStrategy
from nemo2.training.strategies.live_settings import LiveSettings
from nemo2.training.strategies.megatron_config import (
    ddp_config_of,
    refuse_custom_fsdp,
    refuse_unsupported_arguments,
    strictness_of,
    unify_num_instances,
    warn_about_unread_settings,
)
from nemo2.training.strategies.metrics import timers_of

_log = logging.getLogger(__name__)


@configurable(ddp_config="ddp")
class MegatronStrategy(LiveSettings, BaseStrategy):
    """Train with Megatron-Core's parallelisms under Lightning.

    The parameters are NeMo 2.0's. Each parallel size defaults to 1, that is no sharding. ``ddp_config`` is another name
    for ``ddp``. Every argument can be read as an attribute. Sizes and checkpoint settings can also be set until the
    strategy is connected to a model.

    The data-parallel size is the world size divided by the product of the tensor, pipeline and context sizes.

    Args:
        tensor_model_parallel_size: Ranks that share each weight matrix.
        pipeline_model_parallel_size: Pipeline stages, each with its part of the layers.
        context_parallel_size: Ranks that share each sequence.
        expert_model_parallel_size: Ranks that the experts of a layer are distributed over.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline rank, for the interleaved schedule. None: the
            schedule is not interleaved.
        expert_tensor_parallel_size: Tensor-parallel ranks inside an expert. None: ``tensor_model_parallel_size``.
        sequence_parallel: Shard the activations between matrix products over the tensor-parallel ranks.
        microbatch_group_size_per_vp_stage: Consecutive micro-batches that a virtual stage runs. None: the pipeline
            size.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: Layers of a first or last stage that
            differs from the other stages. None: the same number as in the other stages.
        account_for_embedding_in_pipeline_split: Count the embedding as a layer when layers are split into stages.
        account_for_loss_in_pipeline_split: Count the loss as a layer when layers are split into stages.
        pipeline_model_parallel_layout: The layers of each stage, in Megatron-Core's notation. None: the same number in
            each stage.
        pipeline_dtype: The dtype of the tensors that stages send to each other. It must equal the dtype of the
            activations between layers. None: the precision's dtype.
        pipeline_model_parallel_comm_backend: "nccl" or "ucc". None: the backend of the default process group. Runs
            whose ranks communicate over gloo report that they ignore this argument, ``use_sharp`` and
            ``nccl_communicator_config_path``.
        ddp: "megatron", or a ``DistributedDataParallelConfig`` with the settings of buckets, overlap and the
            distributed optimizer.
        num_distributed_optimizer_instances: Replicas of the sharded optimizer state.
        use_tp_pp_dp_mapping: Number the ranks in the order tensor, pipeline, data. False: tensor, context, expert,
            data, pipeline.
        nccl_communicator_config_path: A YAML file with NCCL settings per group, for Megatron-Core.
        use_sharp: Reduce the data-parallel groups' tensors in the network switch.
        use_gloo_process_groups: Also create gloo groups, for the optimizer's checkpoints.
        gradient_as_bucket_view: Must be True, because Megatron-Core's gradients are views of its buffers.
        data_sampler: The sampler that splits batches over ranks. None: the data module's ``data_sampler``.
        parallel_devices, cluster_environment, checkpoint_io: As in Lightning's ``DDPStrategy``.
        find_unused_parameters: Must be False, because Megatron-Core's gradient buffers have no such search.
        ckpt_load_optimizer: Load the optimizer's state from checkpoints.
        ckpt_save_optimizer: Save the optimizer's state in checkpoints.
        ckpt_load_main_params: Start from the fp32 parameters in the checkpoint's optimizer state rather than from the
            16-bit parameters that were rounded from them. No other optimizer state is loaded. Excludes
            ``ckpt_load_optimizer``.
        save_ckpt_format: "torch_dist".
        ckpt_async_save: Write checkpoints in the background.
        ckpt_torch_dist_multiproc: Writer processes per rank. None: Megatron-Core's choice.
        ckpt_assume_constant_structure, ckpt_parallel_save, ckpt_parallel_save_within_dp, ckpt_parallel_load: See
            `MegatronCheckpointIO`.
        ckpt_parallel_save_optim: Save the optimizer's state so that any layout can load it. False: faster, but only the
            same model-parallel layout can load it.
        ckpt_load_directly_on_device: Accepted for NeMo's signature, without effect.
        ckpt_load_strictness: The name of one of Megatron-Core's ``StrictHandling`` values. Megatron-Core calls a tensor
            "unexpected" if the model has it and the checkpoint doesn't. None or True: such a tensor is an error, and
            tensors that only the checkpoint has are ignored. False: "log_all".
        ckpt_save_part: The part of the model that checkpoints hold: "trained" for the trainable parameters, or a
            function that selects parameters by their full names. The other parameters come from the checkpoint that the
            run started from (``restore_config``), also on resume. None: the whole model.
        restore_config: Weights to start from, unless the run resumes from a checkpoint.
        setup_optimizers: Create the optimizer. False: the module has ``automatic_optimization = False`` and updates its
            parameters itself, from their ``main_grad``. Each global batch then counts as a step.
        init_model_parallel: Create Megatron-Core's process groups. False: the caller has created the groups of this
            layout.
        lazy_init: Must be False. A rehearsal builds models without memory.
        use_te_rng_tracker: Use Transformer Engine's random-number tracker. CUDA graphs
            (``model.config.cuda_graph_impl``) turn it on.
        replace_progress_bar: Show nemo2's progress line or bar in place of Lightning's.
        progress_interval: Steps between two progress lines. 0: no lines.
        megatron_log_level: The level of Megatron-Core's timers that run, 0 to 2. Their times are logged with the step's
            metrics. Each timer synchronizes with the device, so steps take longer.
        fsdp: "megatron": shard parameters, gradients and optimizer state with Megatron-FSDP, or the part of them that
            ``ddp_config.data_parallel_sharding_strategy`` names. None: as ``ddp`` says. For torch's FSDP use
            `FSDP2Strategy`.
        moe_extended_tp, encoder_tensor_model_parallel_size: Removed from Megatron-Core. A value other than the default
            is an error that names the replacement.
        encoder_pipeline_model_parallel_size: Removed from Megatron-Core. A value other than the default is an error
            that names the replacement.

    Raises:
        ConfigError: a value that can't work, or a feature that Megatron-Core no longer has.
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
        data_sampler: Optional[DataSampler] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        find_unused_parameters: bool = False,
        ckpt_load_optimizer: bool = True,
        ckpt_save_optimizer: bool = True,
        ckpt_load_main_params: bool = False,
        ddp: Union[Literal["megatron"], DistributedDataParallelConfig] = "megatron",
        fsdp: Optional[Literal["megatron"]] = None,
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
        arguments = dict(locals())
        refuse_unsupported_arguments(arguments)
        if ckpt_load_main_params and ckpt_load_optimizer:
            raise ConfigError(
                "strategy.ckpt_load_main_params=True and strategy.ckpt_load_optimizer=True: the optimizer state already "
                "contains the main parameters. Set one of them to False.",
                rule="one-source-of-optimizer-state",
            )
        ckpt_load_strictness = strictness_of(ckpt_load_strictness)
        self.ddp_config = ddp_config_of(ddp)
        num_distributed_optimizer_instances = unify_num_instances(num_distributed_optimizer_instances, self.ddp_config)
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            data_sampler=data_sampler,
            restore_config=restore_config,
            replace_progress_bar=replace_progress_bar,
            progress_interval=progress_interval,
            groups={
                "use_sharp": use_sharp,
                "pipeline_model_parallel_comm_backend": pipeline_model_parallel_comm_backend,
                "num_distributed_optimizer_instances": num_distributed_optimizer_instances,
                "nccl_communicator_config_path": nccl_communicator_config_path
                and str(Path(nccl_communicator_config_path).expanduser()),
                "order": rank_order(tp_pp_dp=use_tp_pp_dp_mapping),
                "create_gloo_process_groups": use_gloo_process_groups,
            },
        )
        Layout(**{short: arguments[name] for short, name in LAYOUT_FIELDS.items()})  # refuses a wrong size
        self.parallelism = ParallelismConfig(
            **{field.name: arguments[field.name] for field in fields(ParallelismConfig)}
        )
        self.fsdp = fsdp
        if fsdp and pipeline_model_parallel_size > 1:
            raise ConfigError(
                f"strategy.fsdp={fsdp!r} with strategy.pipeline_model_parallel_size={pipeline_model_parallel_size}: "
                "Megatron-FSDP lays its mesh over tensor-, context- and data-parallel ranks only. Set "
                "pipeline_model_parallel_size=1, or leave fsdp unset and shard the optimizer's state "
                "(optim.config.use_distributed_optimizer=True)."
            )
        if fsdp == "megatron":
            from nemo2.mcore.parallel.fsdp import turn_on

            turn_on(self.ddp_config, why="strategy.fsdp='megatron'")
        elif fsdp is not None:
            raise ConfigError(
                f"strategy.fsdp={fsdp!r}: must be 'megatron' or None. To use torch's fully_shard, replace "
                "MegatronStrategy with FSDP2Strategy."
            )
        refuse_custom_fsdp(self.ddp_config)
        warn_about_unread_settings(self.ddp_config)
        self._compared = False
        self.async_save = ckpt_async_save
        self._setup_optimizers = setup_optimizers
        self._init_model_parallel = init_model_parallel
        forms: dict[str, Any] = {
            "load_optimizer": ckpt_load_optimizer,
            "save_optimizer": ckpt_save_optimizer,
            "load_main_params": ckpt_load_main_params,
            "part": ckpt_save_part,
        }
        self._megatron_log_level = megatron_log_level
        if fsdp:
            # Imported here, because no other run reads or writes shards of rows.
            from nemo2.checkpoint.forms.megatron_fsdp import MegatronFSDPForm
            from nemo2.checkpoint.torch_io import torch_checkpoint_io

            self.form = MegatronFSDPForm(self, **forms)
            self._checkpoint_io = torch_checkpoint_io(checkpoint_io, strategy=f"strategy.fsdp={fsdp!r}")
            return
        self.form = MegatronForm(
            self, strictness=ckpt_load_strictness, fully_reshardable=ckpt_parallel_save_optim, **forms
        )
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

    def _check_world(self, world_size: int) -> None:
        super()._check_world(world_size)
        module: Any = self.lightning_module
        has_experts = bool(getattr(getattr(module, "config", None), "num_moe_experts", None))
        if self.fsdp:
            from nemo2.mcore.parallel.fsdp import unshared

            instances: int = self.ddp_config.num_distributed_optimizer_instances
            if problem := unshared(self.layout, world_size, has_experts=has_experts, instances=instances):
                raise ConfigError(f"strategy.fsdp={self.fsdp!r} {problem}")

    # ------------------------------------------------------------------------------------------------------ connecting

    def run_settings(self, model: Any) -> RunSettings:
        """The configurations of ``model``, of its optimizer and of the gradient buffers, on this machine."""
        return RunSettings(
            parallelism=self.parallelism,
            ddp_config=self.ddp_config,
            optimizer_config=getattr(getattr(model, "optim", None), "config", None),
            model_config=getattr(model, "config", None),
            precision=self.precision_plugin,
            machine=Machine.here(),
        )

    def settle(self, model: pl.LightningModule) -> None:
        """Write `nemo2.mcore.settle`'s values into the configurations of ``model``, of its optimizer and of the gradient
        buffers."""
        run = self.run_settings(model)
        settled = settle_run(run, run.machine)
        settled.apply(run)
        announce_machine_settings(settled.machine_decides)

    def on_train_start(self) -> None:
        """Check, when everything is built, that the run can train.

        Raises:
            ConfigError: no optimizer would update the parameters; or an error of `Checkpoints`.
        """
        super().on_train_start()
        module = self.lightning_module
        if not self._setup_optimizers and module is not None and module.automatic_optimization:
            raise ConfigError(
                f"strategy.setup_optimizers=False: {type(module).__name__} uses Lightning's automatic optimization, but "
                "has no optimizer. Set automatic_optimization = False on the module and update its parameters in the "
                "module, or leave setup_optimizers=True."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare the effective configuration with the requested one before the first step, after every callback.

        Raises:
            ConfigError: a setting changed without an announcement.
        """
        super().on_train_batch_start(batch, batch_idx)
        if not self._compared:
            self._compared = True
            configs = self.run_settings(self.lightning_module).configs
            refuse_silent_changes({path: configs[path] for path in (DDP, OPTIM, MODEL)})

    # ------------------------------------------------------------------------------------------------------ building

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Provide what layers need while they are built. Every call of ``configure_model`` runs inside this context."""
        if (userbuffers := self._userbuffers) is not None:
            userbuffers.start_userbuffers(getattr(self.lightning_module, "config", None), self.data_sampler)
        with super().model_sharded_context():
            yield

    def teardown(self) -> None:
        userbuffers = self._userbuffers
        super().teardown()
        if userbuffers is not None:
            userbuffers.stop_userbuffers()  # after the CUDA graphs, which point into the buffers

    @property
    def _userbuffers(self) -> Optional[ModuleType]:
        """The module of the userbuffers. None: the model has none."""
        if not getattr(getattr(self.lightning_module, "config", None), "tp_comm_overlap", False):
            return None
        from nemo2.mcore.overlap import userbuffers

        return userbuffers

    def setup_megatron_parallel(self, trainer: pl.Trainer, *, wrap: bool) -> None:
        """Build the chunks, wrap them for the precision and in DDP buffers, and broadcast the parameters of replica
        0."""
        if (userbuffers := self._userbuffers) is not None:
            self._register(userbuffers.OneSize())
        if wrap:
            run = self.run_settings(self.lightning_module)
            leave_one_bucket(run, say=_log.warning if trainer.is_global_zero else None)
        with adjusting(self.ddp_config, why="Megatron-Core's rule when it makes the buffers"):
            super().setup_megatron_parallel(trainer, wrap=wrap)
        assert self.megatron_parallel is not None
        self.megatron_parallel.__dict__["use_gloo_process_groups"] = self._groups["create_gloo_process_groups"]
        self.megatron_parallel.config.timers = timers_of(self._megatron_log_level)  # pyright: ignore[reportAttributeAccessIssue]
        if wrap:
            self.megatron_parallel.broadcast_params()

    def chunk_options(self, *, wrap: bool) -> dict[str, Any]:
        return {
            "vp_size": self.layout.vp if self.layout.pp > 1 else None,
            "ddp_config": self.ddp_config if wrap else None,
        }

    def connect_optimizer(self) -> None:
        assert self.megatron_parallel is not None
        [optimizer] = self.optimizers
        if isinstance(optimizer, MegatronOptimizer):
            self.megatron_parallel.config.grad_scale_func = optimizer.scale_loss
            self.megatron_parallel.stage_params = optimizer.stage_params
            if self.megatron_parallel.graphs is not None:
                self.megatron_parallel.graphs.optimizers.append(optimizer.mcore_optimizer)

    def refuse_torch_optimizer(self) -> None:
        super().refuse_torch_optimizer()
        assert self.megatron_parallel is not None
        sharded = [
            name
            for name, parameter in self.megatron_parallel.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        ]
        if self.layout.pp > 1 or (self.layout.tp > 1 and sharded):
            raise ConfigError(
                f"This module has a torch optimizer, which doesn't support parameters that are sharded over ranks "
                f"({self.layout.describe()}). Gradient clipping and checkpoints would be wrong. Give the module "
                "`optim=MegatronOptimizerModule(...)`."
            )
        if self.ddp_config.use_distributed_optimizer:
            raise ConfigError(
                "strategy.ddp_config.use_distributed_optimizer=True shards the state of Megatron-Core's optimizer, but "
                "this module has a torch optimizer. Set use_distributed_optimizer=False, or give the module "
                "`optim=MegatronOptimizerModule(...)`."
            )
