# SPDX-License-Identifier: Apache-2.0
"""The base of all strategies: Lightning's hooks from `connect` to `teardown`, in the order of their calls.

`MegatronStrategy` and the strategies whose models torch shards (`nemo2.training.strategies.torch_sharded`) differ in three
hooks: `settle`, `chunk_options` and `connect_optimizer`. Everything else is here: processes and groups, data,
the training step, evaluation, metrics and checkpoints. The strategy's `form` decides the format of checkpoints.
"""

import atexit
import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from megatron.core import parallel_state
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from nemo2.base import ranks
from nemo2.base.advice import advice
from nemo2.base.backend import get_backend
from nemo2.base.backend.attention_variables import attention_chosen_anew
from nemo2.base.backend.base import Backend
from nemo2.base.errors import CheckpointError, ConfigError, DataError, RuntimeFault
from nemo2.base.place import here
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.context import inputs_of, release_of, settings_of, write_context
from nemo2.checkpoint.directory import Manifest, ckpt_to_dir, read_manifest, versions
from nemo2.checkpoint.forms.form import Form, digest_of_base
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.paths import missing
from nemo2.config.notices import announce_machine_settings
from nemo2.config.walk import callbacks_of
from nemo2.data.batch_sampler import EvalBatchSampler
from nemo2.data.sampler import MegatronDataSampler
from nemo2.data.workers import outliving_signals
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.optim.lr_scheduler import set_last_rates
from nemo2.mcore.optim.megatron import MegatronOptimizer
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.forms import reduction_of
from nemo2.mcore.parallel.groups import (
    collective_timeout,
    initialize_model_parallel,
    run_seed,
    seed_random_streams,
    use_existing_groups,
)
from nemo2.mcore.parallel.hooks import CallbackConnector
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel
from nemo2.mcore.parallel.transform import transform_of
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.world import World
from nemo2.models.tracked_losses import report_tracked_losses
from nemo2.training.run_dir.progress import ProgressPrinter, make_progress
from nemo2.training.strategies.metrics import log_timers, nonfinite_gradients, samples_of_step

_log = logging.getLogger(__name__)
_MODES = {"validate": "validation", "sanity_check": "validation", "test": "test", "predict": "predict"}
"""The data sampler's modes by Lightning's stage. Others train."""


class BaseStrategy(DDPStrategy):
    """Train, evaluate and save a model in the form of Megatron-Core's schedules. To be subclassed."""

    trainer: pl.Trainer
    layout: Layout
    form: Form
    data_sampler: Optional[Any]
    """The sampler that splits batches by data-parallel rank. None: the data module's, or none."""
    restore_config: Optional[RestoreConfig]
    megatron_parallel: Optional[MegatronParallel]
    """This rank's chunks. None: they aren't built yet."""
    use_te_rng_tracker: bool = False
    _captures: bool = False
    """Whether CUDA graphs capture steps."""
    _init_model_parallel: bool = True
    _setup_optimizers: bool = True
    _skip_update: bool = False
    _tracked_microbatches: int = 0
    """The micro-batches since Megatron-Core's loss trackers were last read."""
    _unlogged: Optional[dict[str, Any]] = None
    """The metrics of the last step that are known without the device, or all of them, if that step wasn't logged."""
    _loaded: Optional[Path] = None
    """The checkpoint that was read last. None: none was."""
    _whole_without_base: bool = False
    """Whether checkpoints hold the whole model where no other checkpoint holds the rest of it."""

    _cluster_environment: Optional[ClusterEnvironment]

    # ----------------------------------------------------------------------------------------------------- connecting

    @property
    def cluster_environment(self) -> Optional[ClusterEnvironment]:
        """The processes' places. A property, because a trainer sets it: as a public attribute it would count as the user's
        change of a live strategy (`nemo2.config.capture`)."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Optional[ClusterEnvironment]) -> None:
        self._cluster_environment = environment

    def __init__(
        self,
        *,
        parallel_devices: Optional[list[torch.device]],
        cluster_environment: Optional[ClusterEnvironment],
        data_sampler: Optional[Any],
        restore_config: Optional[RestoreConfig],
        replace_progress_bar: bool,
        progress_interval: int,
        process_group_backend: Optional[str] = None,
        groups: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=collective_timeout(),
        )
        self.data_sampler = data_sampler
        self.restore_config = restore_config
        self.replace_progress_bar = replace_progress_bar
        self.progress_interval = progress_interval
        self.megatron_parallel = None
        self.megatron_callbacks = CallbackConnector()
        self._groups = dict(groups)
        """Further arguments of Megatron-Core's ``initialize_model_parallel``."""
        self._own_names: set[str] = set()
        """Metrics that `_evaluated` has logged."""

    def connect(self, model: pl.LightningModule) -> None:
        """Write the strategy's settings into the configurations of the model, the optimizer and DDP.

        Raises:
            ConfigError: settings that can't work, or Lightning's own clipping or accumulation, which would have no
                effect.
        """
        super().connect(model)
        refuse_requests_of_lightning(model.trainer)
        refuse_model_averaging(model.trainer)
        self.settle(model)
        self._captures = kind_of(getattr(model, "config", None)) != "none"
        optim = getattr(model, "optim", None)
        if isinstance(optim, OptimizerModule):
            self._register(optim, optim.lr_scheduler)
        trainer = model.trainer
        bar = trainer.progress_bar_callback if self.replace_progress_bar else None
        if type(bar) in (TQDMProgressBar, RichProgressBar):  # the user's own bar stays
            progress = make_progress(trainer)
            if isinstance(progress, ProgressPrinter):
                progress = ProgressPrinter(log_interval=self.progress_interval)
            trainer.callbacks[trainer.callbacks.index(bar)] = progress  # pyright: ignore[reportAttributeAccessIssue]

    @abstractmethod
    def settle(self, model: pl.LightningModule) -> None:
        """Write the strategy's settings into the configurations of ``model`` and of its optimizer."""

    def _register(self, *objects: Any) -> None:
        self.megatron_callbacks.add(*(item for item in objects if item is not None))

    # --------------------------------------------------------------------------------------------- the world of ranks

    def _configure_launcher(self) -> None:
        """Skip Lightning's launcher for a single process and for one rank of an existing world, such as a rehearsal's.

        Lightning's launcher starts the script again, so neither could run in a notebook with it.
        """
        if self.num_ranks > 1 and not torch.distributed.is_initialized():
            super()._configure_launcher()

    @property
    def num_ranks(self) -> int:
        """The ranks that the trainer asks for."""
        return World(self.num_nodes, self.num_processes).size

    def setup_environment(self) -> None:
        """Set up the device, the world, Megatron-Core's groups, random streams and the batch calculator."""
        self._check_world(self.num_ranks)
        model = self.lightning_module
        if model is not None and self.restore_config is not None and not model.trainer.ckpt_path:
            self.refuse_unfit_weights()
        if isinstance(self.precision_plugin, MegatronMixedPrecision):
            self.precision_plugin.check_hardware(Machine.here())
        backend = get_backend()
        backend.install()
        backend.set_device(self.root_device)
        super().setup_environment()
        if self._init_model_parallel:
            initialize_model_parallel(self.layout, timeout=self._timeout, **self._options_of_groups(backend))
        else:
            use_existing_groups(self.layout)
        self._connect_data_sampler()
        seed_random_streams(run_seed(), te_rng_tracker=self.use_te_rng_tracker, for_graphs=self._captures)

    def _options_of_groups(self, backend: Backend) -> dict[str, Any]:
        """`_groups` without the options that this machine's process groups lack, which are reported once."""
        without = {name: override for name, override in backend.group_overrides().items() if self._groups.get(name)}
        announce_machine_settings({f"strategy.{name}": one for name, one in without.items()})
        return self._groups | {name: value for name, (value, _) in without.items()}

    def setup_distributed(self) -> None:
        """Create the process group.

        A single process uses no port: a port that was free may be in use by now, and an inherited port may be its
        parent's.
        """
        if self.num_ranks == 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                self._get_process_group_backend(),
                store=HashStore(),
                rank=0,
                world_size=1,
                timeout=self._timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
            if self.root_device.type != "cpu":
                atexit.register(_destroy_dist_connection)
        super().setup_distributed()

    def _check_world(self, world_size: int) -> None:
        """Check, before any process group exists, that the world was launched and fits the layout."""
        place = here()
        launched = place.world_size if place.launched else world_size
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally and launched != world_size:
            raise ConfigError(
                f"trainer.num_nodes * trainer.devices = {self.num_nodes} * {self.num_processes} = {world_size}, but "
                f"the launcher started {launched} process{'es' if launched > 1 else ''}. Set trainer.num_nodes and "
                f"trainer.devices to the launched nodes and processes per node, or launch {world_size} "
                f"process{'es' if world_size > 1 else ''} ({advice('--devices', 'ntasks_per_node')})."
            )
        self.layout.data_parallel_size(world_size)

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or get_backend().process_group_backend

    # ----------------------------------------------------------------------------------------------------------- data

    def _connect_data_sampler(self) -> None:
        if self.lightning_module is None:
            return  # a script that needs only the process groups
        trainer = self.lightning_module.trainer
        datamodule = getattr(trainer, "datamodule", None)
        self.data_sampler = self.data_sampler or getattr(datamodule, "data_sampler", None)
        if self.data_sampler is None:
            return
        self.data_sampler.connect(trainer)
        self.data_sampler.setup(self.cluster_environment.global_rank())  # pyright: ignore[reportOptionalMemberAccess]
        # Our sampler knows the data-parallel ranks, whereas Lightning's would split by global rank.
        trainer._accelerator_connector.use_distributed_sampler = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler that Lightning gives plain loaders, whose replicas are the data-parallel ranks."""
        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.data_sampler is None:
            warn_of_equal_data(dataloader, self.trainer)
            return outliving_signals(with_own_generator(dataloader))
        stage = str(getattr(self.trainer.state.stage, "value", "") or "")
        mode = getattr(dataloader, "mode", _MODES.get(stage, "train"))
        options = {}
        if mode in ("validation", "test"):
            reduction = reduction_of(self.lightning_module, mode)
            # Passed only if the reduction keeps the last samples, because the user's own samplers may lack the option.
            options = {} if getattr(reduction, "val_drop_last", True) else {"drop_last": False}
        loader = self.data_sampler.transform_dataloader(
            dataloader, consumed_samples=self.consumed_samples, mode=mode, **options
        )
        return outliving_signals(with_own_generator(loader))

    @property
    def consumed_samples(self) -> int:
        """The samples that training has consumed, including those before a resume. 0 without a Megatron data
        sampler."""
        return self.data_sampler.consumed_samples if self.data_sampler is not None else 0

    def batch_to_device(self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0) -> Any:
        """Return the batch unchanged: the data step moves one micro-batch at a time."""
        return batch

    # ------------------------------------------------------------------------------------------------------- building

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """The context in which every call of ``configure_model`` runs."""
        with super().model_sharded_context(), attention_chosen_anew():
            yield

    @contextmanager
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Generator[None, None, None]:
        """An empty context, because Megatron-Core places its own parameters."""
        yield

    def model_to_device(self) -> None:
        """Does nothing: the chunks were moved to the device before they were wrapped."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Build, wrap and shard this rank's chunks, make the optimizer, take backward out of Lightning's hands, and load
        the weights of ``restore_config``."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.trainer = trainer
        callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._register(*callbacks, getattr(trainer, "datamodule", None), self.data_sampler)
        self.setup_megatron_parallel(trainer, wrap=self._is_fitting)
        if self._is_fitting:
            assert self.megatron_parallel is not None
            if self.megatron_parallel.parameter_counts is not None and self.is_global_zero:
                _log.info("%s: %s.", type(self.lightning_module).__name__, self.megatron_parallel.parameter_counts)
            # The schedule runs forward and backward together, so Lightning's zero_grad would erase the gradients.
            trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward = True
            get_backend().build_extensions(self.megatron_parallel.config, local_rank=self.local_rank)
            if self._setup_optimizers:
                self.setup_optimizers(trainer)
        if self.restore_config is not None and not trainer.ckpt_path:
            self.selective_restore()

    def setup_megatron_parallel(self, trainer: pl.Trainer, *, wrap: bool) -> None:
        """Build ``megatron_parallel`` on the device and in the precision of this run, wrapped for training with
        ``wrap``."""
        assert self.lightning_module is not None
        precision = self.precision_plugin
        self.model = self.megatron_parallel = MegatronParallel(
            self.lightning_module,
            precision_plugin=precision if isinstance(precision, MegatronMixedPrecision) else None,
            callbacks=self.megatron_callbacks,
            device=self.root_device,
            transform=transform_of(self.lightning_module, trainer.callbacks),  # pyright: ignore[reportAttributeAccessIssue]
            **self.chunk_options(wrap=wrap),
        )

    @abstractmethod
    def chunk_options(self, *, wrap: bool) -> dict[str, Any]:
        """The arguments of `MegatronParallel` that wrap or shard the chunks."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizer of the module's ``optim``, or take the optimizer of its ``configure_optimizers``.

        Raises:
            ConfigError: the module defines no optimizer, several optimizers, or one that this strategy doesn't support.
        """
        assert self.lightning_module is not None and self.megatron_parallel is not None
        optim = getattr(self.lightning_module, "optim", None)
        source = "configure_optimizers"
        if isinstance(optim, OptimizerModule):
            optim.schedule_over(trainer.max_steps)
        if isinstance(optim, OptimizerModule) and not optim.makes_torch_optimizers:
            source = type(optim).__name__
            entries = [dict(entry) for entry in optim(self.lightning_module, self.megatron_parallel)]
            self.optimizers = [entry.pop("optimizer") for entry in entries]
            schedules = [entry.get("lr_scheduler", entry) or {} for entry in entries]
            self.lr_scheduler_configs = [LRSchedulerConfig(**one) for one in schedules if "scheduler" in one]
        else:
            self.refuse_torch_optimizer()
            super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"{source} returned {len(self.optimizers)} optimizers, but {type(self).__name__} supports one. Return a "
                "single optimizer, or give the module `optim=MegatronOptimizerModule(...)`."
            )
        self.connect_optimizer()

    def refuse_torch_optimizer(self) -> None:
        """Check that torch's optimizers can update this model.

        Raises:
            ConfigError: they can't.
        """
        assert self.megatron_parallel is not None
        if getattr(self.megatron_parallel.config, "fp16", False):
            raise ConfigError(
                "trainer.plugins.precision='16-mixed' requires an optimizer that scales the loss, but this module has "
                "a torch optimizer, so small gradients would underflow. Give the module "
                "`optim=MegatronOptimizerModule(...)`, or use 'bf16-mixed'."
            )

    @abstractmethod
    def connect_optimizer(self) -> None:
        """Connect the optimizer to the schedule, which scales the loss."""

    # ------------------------------------------------------------------------------------------------ a training step

    def on_train_start(self) -> None:
        """Set the rates of the restored schedules, which schedules of torch's multiply, and check that saved parts can be
        completed. Weights are already loaded.

        Raises:
            ConfigError: only a part of the model is to be saved, and the source of the other parameters is unknown.
        """
        super().on_train_start()
        refuse_batch_norms(self.trainer, self.megatron_parallel.unwrapped if self.megatron_parallel else ())
        for config in self.lr_scheduler_configs:
            set_last_rates(config.scheduler)
        part = self.form.part
        if part is not None and not self.form.base and self._whole_without_base:
            self.form.part = None
        elif part is not None and not self.form.base:
            raise ConfigError(
                f"strategy.ckpt_save_part={part!r}: this run knows no checkpoint with the rest of the model. Set "
                "resume.restore_config.path to the base checkpoint, or leave ckpt_save_part unset."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Publish a background save that has finished."""
        refuse_requests_of_lightning(self.trainer)  # a callback may have changed it
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and io.async_save:
            io.maybe_finalize_save_checkpoint(blocking=False)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True: a step accumulates the gradients of its micro-batches."""
        return True

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step: forward and backward, the hooks after backward, the update, the metrics.

        ``closure`` is Lightning's, which calls `training_step`. Returns its result.
        """
        loss = closure()
        self._call_hooks("on_after_backward")
        self._call_hooks("on_before_optimizer_step", optimizer)
        if not isinstance(optimizer, MegatronOptimizer):
            # Megatron-Core keeps gradients in its own buffers, and a torch optimizer reads `.grad`.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = getattr(parameter, "main_grad", None)
                    if gradient is not None:
                        parameter.grad = gradient.to(parameter.dtype)
        # What schedules of nemo2 ask before they advance. A skipped update has no norm either.
        optimizer.update_successful = not self._skip_update  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.grad_norm = None  # pyright: ignore[reportAttributeAccessIssue]
        if not self._skip_update:
            optimizer.step()
        self._skip_update = False
        self._log_step(optimizer)
        return loss

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        """Call a hook of the callbacks and of the module that Lightning calls around its own backward."""
        call._call_callback_hooks(self.trainer, name, *arguments)
        call._call_lightning_module_hook(self.trainer, name, *arguments)

    def training_step(self, batch: Any, batch_idx: Optional[int] = None, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over this rank's part of a global batch. Returns the reduced loss."""
        assert self.megatron_parallel is not None
        step = self.trainer.global_step
        shape = self._batch_shape("train")
        self.megatron_parallel.zero_grad_buffer()
        for optimizer in self.optimizers:
            self._call_hooks("on_before_zero_grad", optimizer)
            optimizer.zero_grad()
        try:
            with nonfinite_gradients(step):
                loss = self.megatron_parallel.training_step(batch, step_i=step, **shape)
        except DataError as error:
            raise DataError(f"Step {step + 1}, {self._samples_of_step()}: {error}") from error
        self._tracked_microbatches += shape.get("num_microbatches", 1)
        self._last_loss = loss
        if not self.optimizers:
            self._log_step(None)
            # Lightning counts updates of its own optimizers only, and would never reach max_steps.
            progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            progress.increment_ready()
            progress.increment_completed()
        return loss

    @property
    def last_loss(self) -> Tensor:
        """The loss of the current or the last step, reduced over the global batch. The same on every rank."""
        return self._last_loss

    def skip_update(self) -> None:
        """Skip the update of the current step. Every rank must call it before the optimizer steps."""
        self._skip_update = True

    def _batch_shape(self, stage: Literal["train", "eval"]) -> dict[str, int]:
        """The number and the shape of micro-batches, from the data sampler. Without a sampler, a loader's item is
        one micro-batch."""
        sampler = self.data_sampler
        if sampler is None:
            return {}
        if stage == "train":
            sampler.update_num_microbatches()
            num_microbatches = sampler.num_microbatches
        else:
            replicas = parallel_state.get_data_parallel_world_size()
            num_microbatches = sampler.global_batch_size // (sampler.micro_batch_size * replicas)
        shape = {"num_microbatches": num_microbatches, "micro_batch_size": sampler.micro_batch_size}
        shape["seq_length"] = sampler.seq_len
        if sampler.decoder_seq_len is not None:
            shape["decoder_seq_length"] = sampler.decoder_seq_len
        return shape

    def on_train_end(self) -> None:
        if self.megatron_parallel is not None:
            self.megatron_parallel.force_param_sync()

    # -------------------------------------------------------------------------------------------------------- metrics

    def _log_step(self, optimizer: Optional[torch.optim.Optimizer]) -> None:
        """Log metrics under NeMo's names on the steps that Lightning logs. Other steps cost nothing.
        ``optimizer=None``: there is no optimizer."""
        trainer, module = self.trainer, self.lightning_module
        if module is None:
            return
        step = trainer.global_step
        host_metrics: dict[str, Any] = {"global_step": float(step), "step": float(step)}
        if optimizer is not None:
            host_metrics["lr"] = float(optimizer.param_groups[0]["lr"])
        if self.data_sampler is not None and getattr(self.data_sampler, "output_log", True):
            size = self.data_sampler.current_global_batch_size
            host_metrics |= {
                "consumed_samples": float(self.consumed_samples + size),
                "global_batch_size": float(size),
            }
        logs = (step + 1) % max(1, trainer.log_every_n_steps) == 0  # pyright: ignore[reportAttributeAccessIssue]
        if not logs and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._unlogged = host_metrics
            return
        self._refuse_empty_masks()
        metrics = self._step_metrics(optimizer, host_metrics)
        self._unlogged = None if logs else metrics
        for name, value in metrics.items():
            module.log(name, value, prog_bar=name in ("reduced_train_loss", "lr"), batch_size=1)

    def step_metrics(self) -> dict[str, float]:
        """The metrics of the last step of training, if that isn't a step that Lightning logs. Every rank calls it."""
        if self._unlogged is None:
            return {}
        if "reduced_train_loss" not in self._unlogged:
            self._unlogged = self._step_metrics(self.optimizers[0] if self.optimizers else None, self._unlogged)
        return {name: float(value) for name, value in self._unlogged.items()}

    def log_last_step(self) -> None:
        """Log the last step of training if it isn't a step that Lightning logs. Every rank calls it at the end of
        training."""
        values = self.step_metrics()
        self._unlogged = None
        if not values:
            return
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=int(values["step"]))

    def _step_metrics(self, optimizer: Optional[torch.optim.Optimizer], host_metrics: dict[str, Any]) -> dict[str, Any]:
        """``host_metrics`` and the metrics of the last step that the device computes."""
        metrics: dict[str, Any] = {"reduced_train_loss": self._last_loss.float(), **host_metrics}
        for name in ("grad_norm", "num_zeros_in_grad", "loss_scale"):  # a torch optimizer has none of them
            if (value := getattr(optimizer, name, None)) is not None:
                metrics[name] = float(value)
        if self.megatron_parallel is not None:
            metrics |= report_tracked_losses(self.megatron_parallel.config, microbatches=self._tracked_microbatches)
            self._tracked_microbatches = 0
            log_timers(self.megatron_parallel.config.timers, int(host_metrics["step"]) + 1)
        return metrics

    def _refuse_empty_masks(self) -> None:
        """Raise an error if no token of the global batch counts. Its loss is 0.0, and it trains nothing.

        Raises:
            DataError: no token counts.
        """
        weight = self.megatron_parallel.weight if self.megatron_parallel is not None else None
        if weight is None or float(weight) > 0:
            return
        raise DataError(
            f"Step {self.trainer.global_step + 1}, {self._samples_of_step()}: loss_mask is 0 for all tokens, so this step trains "
            "on nothing. Set the loss_mask of tokens to train on to 1, or leave such samples out."
        )

    def _samples_of_step(self) -> str:
        return samples_of_step(self.trainer.train_dataloader, self.consumed_samples)

    # ----------------------------------------------------------------------------------------------------- evaluation

    def on_validation_start(self) -> None:
        if self.megatron_parallel is not None and self._is_fitting:
            self.megatron_parallel.pause_param_gather()

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Optional[Tensor]:
        """The reduced loss of one global batch, logged as ``val_loss``. None: the module's step returns none.

        ``val_loss`` is the mean over batches, weighted by the number of tokens or samples in each mean. A batch that is
        half padding counts half.
        """
        return self._evaluated(
            batch, "validation", "val_loss", self.trainer.val_dataloaders, args, kwargs, prog_bar=True
        )

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Optional[Tensor]:
        return self._evaluated(batch, "test", "test_loss", self.trainer.test_dataloaders, args, kwargs)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's ``predict_step`` (or ``forward_step``). Tensors of several micro-batches are
        concatenated, other results are in a list. None on ranks without the last pipeline stage."""
        assert self.megatron_parallel is not None
        return self.megatron_parallel.predict_step(batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval"))

    def _evaluated(
        self, batch: Any, stage: str, name: str, loaders: Any, args: tuple, kwargs: dict[str, Any], **options: Any
    ) -> Optional[Tensor]:
        """The reduced loss of one global batch. If there is one and the module's own step hasn't logged ``name``, the
        weighted mean over batches is logged under it.

        Lightning rejects a second value of a name. If a reduction doesn't define its weight, the batch's samples are the
        weight.
        """
        parallel, module = self.megatron_parallel, self.lightning_module
        assert parallel is not None and module is not None
        step_i = _batch_idx(args, kwargs)
        loss = getattr(parallel, f"{stage}_step")(batch, step_i=step_i, **self._batch_shape("eval"))
        by_module = name not in self._own_names and f"{module._current_fx_name}.{name}" in (self.trainer._results or {})
        if loss is not None and not by_module:
            self._own_names.add(name)
            weight = self._samples_of(loaders, args, kwargs) if parallel.weight is None else int(parallel.weight)
            module.log(name, loss, on_step=False, on_epoch=True, batch_size=weight, **options)
        return loss

    def _samples_of(self, loaders: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The samples of the dataset in the global batch of an evaluation step. 1: the loader isn't nemo2's."""
        loaders = loaders if isinstance(loaders, list) else [loaders]
        index = kwargs.get("dataloader_idx", args[1] if len(args) > 1 else 0)
        sampler = getattr(loaders[index] if index < len(loaders) else None, "batch_sampler", None)
        return sampler.samples_in(_batch_idx(args, kwargs)) if isinstance(sampler, EvalBatchSampler) else 1

    def on_validation_end(self) -> None:
        if self.megatron_parallel is not None and self._is_fitting:
            self.megatron_parallel.resume_param_gather()
            # Lightning puts all chunks into evaluation mode, but restores only the modules of the first chunk.
            for chunk in list(self.megatron_parallel)[1:]:
                chunk.train()

    # --------------------------------------------------------------------------------------------------------- saving

    @property
    def checkpoint_io(self) -> CheckpointIO:
        # Lightning's property puts its own writer into a plugin that wraps another, such as AsyncCheckpointIO.
        assert self._checkpoint_io is not None
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def save_trained_parameters_only(self) -> None:
        """Save the trainable parameters only, unless the user has set what checkpoints hold, or no checkpoint holds the
        other parameters: `on_train_start` knows that."""
        if self.form.part is None:
            self.form.part = "trained"
            self._whole_without_base = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """An empty state, so that Lightning's own dump has no tensors. `save_checkpoint` adds the sharded tensors."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self.form.optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, Path], storage_options: Optional[dict[str, Any]] = None
    ) -> None:
        """Save Lightning's ``checkpoint`` with this rank's part of the model and the optimizer. Every rank must call
        it.

        ``storage_options``: ``published``, ``metrics`` and ``with_context``, see `ModelCheckpoint.save`; ``overwrite``, see
        `nemo2.checkpoint.directory.publish`.
        """
        self._refuse_nonfinite(self.form.parameters(), filepath)
        with_optimizer = "optimizer_states" in checkpoint
        state: dict[str, Any] = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        state |= self.form.state(optimizer=with_optimizer)
        state["nemo2"] = {"consumed_samples": self.consumed_samples, "global_step": self.trainer.global_step}
        if isinstance(self.data_sampler, MegatronDataSampler):
            state["nemo2"] |= self.data_sampler.state_dict()
        options = self._storage_options(storage_options, weights_only=not (with_optimizer and self.form.save_optimizer))
        self.checkpoint_io.save_checkpoint(state, ckpt_to_dir(filepath), storage_options=options)

    def _refuse_nonfinite(self, tensors: Iterable[Tensor], filepath: Union[str, Path]) -> None:
        """Reject a save of parameters that aren't finite, because retention would delete good checkpoints for it.

        Args:
            tensors: This rank's part of the parameters.

        Raises:
            RuntimeFault: on every rank, if some parameter of some rank isn't finite.
        """
        # Checked by the smallest and largest value, which NaN propagates to. This needs no memory and one read.
        extremes = [
            torch.aminmax(tensor.detach()) for tensor in tensors if tensor.numel() and tensor.is_floating_point()
        ]
        flags = [value.isfinite() for pair in extremes for value in pair]
        finite = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
        if ranks.largest((~finite).to(dtype=torch.int32, device=self.root_device).reshape(1)):
            raise RuntimeFault(
                f"After step {self.trainer.global_step} some parameters aren't finite, so {ckpt_to_dir(filepath).name} "
                "is not saved. Earlier checkpoints are kept. Resume from the last checkpoint with a lower learning "
                "rate, or with the callback LossGuard(on_nonfinite='skip')."
            )

    def _storage_options(self, options: Optional[dict[str, Any]], *, weights_only: bool) -> dict[str, Any]:
        """The options for the checkpoint IO, from those that `ModelCheckpoint.save` passed to the strategy."""
        options = options or {}
        manifest = Manifest(
            step=self.trainer.global_step,
            consumed_samples=self.consumed_samples,
            layout=self.form.layout_record(),
            metrics=options.get("metrics") or {},
            weights_only=weights_only,
            settings=settings_of(self.trainer) | inputs_of(self.trainer),
            part_of=None if self.form.part is None else str(self.form.base),
            part_of_digest="" if self.form.part is None else digest_of_base(str(self.form.base)),
            versions=versions(),
            **(options.get("run") or {}),
        )
        with_context = options.get("with_context", True)
        return {
            "manifest": manifest,
            "write_context": (
                (lambda path: write_context(path, self.trainer, release=self._release())) if with_context else None
            ),
            "published": options.get("published"),
            "overwrite": options.get("overwrite", False),
            **self.form.storage_options(),
        }

    def _release(self) -> Optional[dict[str, Any]]:
        """The config.json of the release that this run's weights come from. None: there is none."""
        restore = self.restore_config
        begun = restore.path if restore is not None and restore.load_model_state else None
        paths = [str(path) for path in (self._loaded, begun) if path]
        return next((release for path in paths if (release := release_of(path)) is not None), None)

    def remove_checkpoint(self, filepath: Union[str, Path]) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(ckpt_to_dir(filepath))

    # -------------------------------------------------------------------------------------------------------- loading

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: state is loaded into chunks that are built, wrapped and sharded."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self.form.lightning_loads_optimizer

    def load_checkpoint(self, checkpoint_path: Union[str, Path], weights_only: Optional[bool] = None) -> dict[str, Any]:
        """Read a checkpoint into this rank's shard of the model and, when fitting, of the optimizer.

        If `AutoResume` chose the checkpoint itself and it is damaged, the previous checkpoint is read instead.

        Raises:
            CheckpointError: the checkpoint is unreadable, or has no optimizer state that this strategy can load.
        """
        self._loaded = path = Path(checkpoint_path)
        io = self.checkpoint_io
        if not isinstance(io, MegatronCheckpointIO):
            return io.load_checkpoint(path)
        read = functools.partial(self.form.read, optimizer=self._is_fitting)
        read_from, loaded = io.loading.read_whole(path, read, fall_back=io.fall_back)
        if read_from != path and self.trainer.ckpt_path:
            # Lightning reports this path, and callbacks read it to learn what the run resumed from.
            self.trainer._checkpoint_connector._ckpt_path = read_from
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load chunks, optimizer, random streams and the position in the data from the result of `load_checkpoint`."""
        self.form.take(checkpoint, strict=strict)
        # When fitting: restore the random streams and the position in the data, if `checkpoint` has them.
        if not self._is_fitting:
            return
        if "random_state" in checkpoint:
            from nemo2.checkpoint.random_state import load_random_state

            load_random_state(checkpoint["random_state"])
        position = checkpoint.get("nemo2")
        if position is not None and self.data_sampler is not None and self.trainer.ckpt_path:
            self.data_sampler.load_state_dict(position)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.form.load_optimizer_states(checkpoint["optimizer_states"])

    def refuse_unfit_weights(self) -> None:
        """Check that the checkpoint of ``restore_config`` fits the model, which need not be built.

        Raises:
            CheckpointError: it doesn't exist, has no optimizer state that is to be loaded, or has weights of other sizes.
        """
        from nemo2.checkpoint.changes import refuse_other_shapes

        assert self.restore_config is not None
        path, name = self.restore_config.checkpoint, f"resume.restore_config.path={self.restore_config.path}"
        if path is None:
            return
        if (why := missing(self.restore_config.path)) is not None:
            raise CheckpointError(f"{name}: {why}")
        manifest = read_manifest(path) if self.restore_config.load_optim_state else None
        if manifest is not None and manifest.weights_only:
            raise CheckpointError(
                f"resume.restore_config.load_optim_state=True: {path} holds weights only. Set load_optim_state=False, or the "
                "path of a checkpoint with the optimizer's state (log.ckpt.save_optim_on_train_end=True saves it at the end)."
            )
        if self.restore_config.load_model_state:
            refuse_other_shapes(path, *self._config_and_method(), name=name)

    def _config_and_method(self) -> tuple[Any, Any]:
        """The model's configuration and its PEFT method."""
        model = self.lightning_module
        return getattr(model, "config", None), getattr(model, "model_transform", None)

    def selective_restore(self) -> None:
        """Start from the weights, and if requested the optimizer state, of ``restore_config``, see `refuse_unfit_weights`.

        Raises:
            CheckpointError: the checkpoint is unreadable or doesn't fit the model.
        """
        from nemo2.checkpoint.changes import warn_if_trained_otherwise

        assert self.restore_config is not None
        path = self.restore_config.checkpoint
        if path is None:
            if self.restore_config.load_model_state:
                self.start_from_released(self.restore_config.path)
            return
        loaded = self.form.read(
            path,
            optimizer=self.restore_config.load_optim_state,
            model=self.restore_config.load_model_state,
            base=True,
        )
        # Neither the position in the data nor the random streams are restored, because this is another run.
        kept = {key: value for key, value in loaded.items() if key in ("model", "optimizer")}
        self.load_model_state_dict(kept, strict=True)
        _log.info("Started from the weights of %s.", path)
        warn_if_trained_otherwise(path, *self._config_and_method(), name=path)

    def start_from_released(self, path: str) -> None:
        """Fill the model with released weights. Each rank reads its part, and every rank must call it.

        Args:
            path: ``hf:///folder`` or ``hf://organisation/name``.

        Raises:
            CheckpointError: on every rank, if a rank can't read its part or the weights don't fit the model.
            ConfigError: an optimizer state is to be loaded, which no release has.
        """
        from nemo2.hugging_face.restore import start_from

        if self.restore_config is not None and self.restore_config.load_optim_state:
            raise ConfigError(
                f"resume.restore_config.load_optim_state=True: {path} contains weights only, like all released models. "
                "Set load_optim_state=False."
            )
        shards, added = self.form.model_shards(), self.form.added_keys()
        config = getattr(self.lightning_module, "config", None)
        start_from(path, config=config, shards=shards, also=added, downloads=self.local_rank == 0)
        self.form.report_loaded_keys({shard.key for shard in shards} - added)
        self.form.finish_reading(model=True, optimizer=False)
        _log.info("Started from the weights of %s.", path)

    # -------------------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        """Finish the work of the checkpoint IO. The groups stay, so that the model remains usable. Another layout
        replaces them."""
        self.checkpoint_io.teardown()
        if self.megatron_parallel is not None and self.megatron_parallel.graphs is not None:
            self.megatron_parallel.graphs.close()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Publish the background saves that all ranks have written, and discard the others: finishing them needs all
        ranks, and this may be the only rank that failed."""
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and self.world_size > 1:
            io.abandon()


def requests_of_lightning(trainer: Any) -> Iterator[str]:
    """A message for each part of Megatron-Core's step that Lightning is asked to do: clipping and accumulating gradients.

    Args:
        trainer: The trainer, or its node in a recipe.
    """
    clip, batches = getattr(trainer, "gradient_clip_val", None), getattr(trainer, "accumulate_grad_batches", 1)
    if clip is not None:
        yield (
            f"trainer.gradient_clip_val={clip}: Megatron-Core clips gradients in its optimizer step. Set "
            f"optim.config.clip_grad={clip}, and leave trainer.gradient_clip_val unset."
        )
    if getattr(trainer, "gradient_clip_algorithm", None) == "value":
        yield (
            "trainer.gradient_clip_algorithm='value': Megatron-Core clips gradients by their norm. Set optim.config.clip_grad to "
            "the largest norm, and leave trainer.gradient_clip_algorithm unset."
        )
    if batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={batches}: every step already accumulates the gradients of its micro-batches. "
            "Raise data.global_batch_size instead, and leave trainer.accumulate_grad_batches=1."
        )
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler) and {*callback.scheduling.values()} != {1}:
            yield (
                f"trainer.callbacks has a GradientAccumulationScheduler({callback.scheduling}): every step already accumulates "
                "the gradients of its micro-batches. Remove the callback, and set data.global_batch_size, or "
                "data.rampup_batch_size to let it grow."
            )


def refuse_requests_of_lightning(trainer: pl.Trainer) -> None:
    """
    Raises:
        ConfigError: with all `requests_of_lightning`.
    """
    if problems := [*requests_of_lightning(trainer)]:
        raise ConfigError("\n".join(problems))


def refuse_batch_norms(trainer: pl.Trainer, chunks: Iterable[nn.Module]) -> None:
    """Reject ``sync_batchnorm`` if the model has batch norms, which this strategy doesn't replace. The models of nemo2 have
    none, and scripts set it all the same.

    Raises:
        ConfigError: there is one.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    kind, synchronized = nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm
    if getattr(trainer.strategy, "_layer_sync", None) and any(
        isinstance(module, kind) and not isinstance(module, synchronized) for module in modules
    ):
        raise ConfigError(
            "trainer.sync_batchnorm=True: this strategy does not replace the batch norms of a model. Replace them in the model "
            "(torch.nn.SyncBatchNorm.convert_sync_batchnorm), and leave trainer.sync_batchnorm unset."
        )


def refuse_model_averaging(trainer: pl.Trainer) -> None:
    """Reject Lightning's callbacks that average weights: they copy the LightningModule and write into the parameters,
    while the optimizer holds its own copies and shards.

    Raises:
        ConfigError: there is such a callback.
    """
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ConfigError(
                f"trainer.callbacks has {type(callback).__name__}, which averages whole models in the memory of each process. "
                f"{type(trainer.strategy).__name__} shards them. Remove the callback."
            )


def _batch_idx(args: tuple, kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("batch_idx", args[0] if args else 0) or 0)


def with_own_generator(dataloader: Any) -> Any:
    """The loader with its own random generator.

    A loader draws a number each time it is iterated. On a CPU torch's default generator also feeds dropout, and a
    resumed run iterates at other steps than an uninterrupted one.
    """
    if isinstance(dataloader, DataLoader) and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(run_seed())
    return dataloader


def warn_of_equal_data(dataloader: Any, trainer: pl.Trainer) -> None:
    """Warn about a plain loader without a data sampler and with Lightning's sampler switched off, because nothing
    splits its data."""
    plain = isinstance(dataloader, DataLoader) and isinstance(dataloader.sampler, (SequentialSampler, RandomSampler))
    if not plain or trainer._accelerator_connector.use_distributed_sampler:
        return
    replicas = parallel_state.get_data_parallel_world_size()
    if replicas > 1:
        _log.warning(
            "trainer.use_distributed_sampler=False, and the data has neither a data_sampler nor a distributed sampler: all %d "
            "data-parallel replicas train on the same samples. Set trainer.use_distributed_sampler=True, or give the data "
            "module a MegatronDataSampler.",
            replicas,
        )
