# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer, which records its arguments and checks them against this machine before anything starts."""

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from nemo2.config.capture import configurable
from nemo2.config.factories import refuse_text
from nemo2.errors import ConfigError
from nemo2.place import here
from nemo2.precision import MegatronMixedPrecision
from nemo2.run_dir.max_time import RunTimer
from nemo2.settle.machine import Machine
from nemo2.settle.world import devices_of
from nemo2.strategies.stepping import SteppingStrategy

if TYPE_CHECKING:
    from nemo2.fabric import Fabric

_Plugin = Union[Precision, ClusterEnvironment, CheckpointIO, LayerSync]


@configurable
class Trainer(pl.Trainer):
    """Run training, validation and testing with Lightning's Trainer. The arguments are Lightning's, with these
    differences:

    - ``val_check_interval`` as an integer counts optimizer steps over the whole run rather than within an epoch, and
      may exceed an epoch. ``check_val_every_n_epoch`` is None by default when ``val_check_interval`` is an integer.
    - ``num_sanity_val_steps`` defaults to 0.
    - ``accelerator="auto"`` selects GPUs where the machine has any, and CPU processes elsewhere.
    - ``max_time`` starts from zero in each run that resumes.

    With a strategy of nemo2, three more differences apply:

    - The trainer has a logger, a model summary and a checkpoint callback only if you ask for them.
    - ``precision`` is short for ``plugins=MegatronMixedPrecision(precision)``.
    - ``use_distributed_sampler`` affects plain loaders only. Data modules with a ``data_sampler`` split their batches
      by data-parallel rank.

    Raises:
        ConfigError: the machine lacks the requested devices and no launcher started the processes, or an argument that
            needs an object is a string.
    """

    def __init__(
        self,
        *,
        accelerator: Union[str, Accelerator] = "auto",
        strategy: Union[str, Strategy] = "auto",
        devices: Union[list[int], str, int] = "auto",
        num_nodes: int = 1,
        precision: Optional[Union[str, int]] = None,
        logger: Optional[Union[Logger, Iterable[Logger], bool]] = None,
        callbacks: Optional[Union[list[pl.Callback], pl.Callback]] = None,
        fast_dev_run: Union[int, bool] = False,
        max_epochs: Optional[int] = None,
        min_epochs: Optional[int] = None,
        max_steps: int = -1,
        min_steps: Optional[int] = None,
        max_time: Optional[Union[str, timedelta, dict[str, int]]] = None,
        limit_train_batches: Optional[Union[int, float]] = None,
        limit_val_batches: Optional[Union[int, float]] = None,
        limit_test_batches: Optional[Union[int, float]] = None,
        limit_predict_batches: Optional[Union[int, float]] = None,
        overfit_batches: Union[int, float] = 0.0,
        val_check_interval: Optional[Union[int, float, str, timedelta, dict[str, int]]] = None,
        check_val_every_n_epoch: Optional[int] = None,
        num_sanity_val_steps: Optional[int] = None,
        log_every_n_steps: Optional[int] = None,
        enable_checkpointing: Optional[bool] = None,
        enable_progress_bar: Optional[bool] = None,
        enable_model_summary: Optional[bool] = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: Optional[Union[int, float]] = None,
        gradient_clip_algorithm: Optional[str] = None,
        deterministic: Optional[Union[bool, Literal["warn"]]] = None,
        benchmark: Optional[bool] = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Optional[Union[Profiler, str]] = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Optional[Union[_Plugin, list[_Plugin]]] = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: Optional[str] = None,
        enable_autolog_hparams: bool = True,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        refuse_text(Trainer, arguments, of="trainer.")
        if _no_gpu() and accelerator == "auto":
            # Lightning accepts only an integer number of CPU processes, and a recipe may count GPUs in other ways.
            devices = arguments["devices"] = devices_of(devices, Machine.here())
        check_devices(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
        if not isinstance(val_check_interval, int) and check_val_every_n_epoch is None:
            arguments["check_val_every_n_epoch"] = 1  # Lightning's default: the interval counts within an epoch
        if num_sanity_val_steps is None:
            # Lightning's default is two validation steps before training. Pipelines and overlapped gathers need a
            # training step first.
            arguments["num_sanity_val_steps"] = 0
        if _no_gpu() and accelerator == "auto":
            arguments["accelerator"] = "cpu"
        if isinstance(strategy, SteppingStrategy) and precision is not None:
            # Lightning's own plugin casts in hooks that the pipeline schedule bypasses, so it would have no effect.
            arguments["plugins"] = [*_listed(plugins), _precision_plugin(precision, plugins)]
            arguments["precision"] = None
        if isinstance(strategy, SteppingStrategy):
            # Lightning's checkpoint callback writes single files, its summary counts only this rank's shard, and its
            # default logger creates a folder beside the run's. The run directory provides all three.
            given = _listed(callbacks)
            if enable_checkpointing is None and not any(isinstance(item, Checkpoint) for item in given):
                arguments["enable_checkpointing"] = False
            arguments["enable_model_summary"] = bool(enable_model_summary)
            arguments["logger"] = False if logger is None else logger
        # Evaluated first, because Lightning appends its own to the list that it receives.
        has_timer = any(isinstance(item, Timer) for item in _listed(callbacks))
        super().__init__(**arguments)
        if 0 < max_steps < self.log_every_n_steps:  # pyright: ignore[reportAttributeAccessIssue]
            self.log_every_n_steps = max_steps  # otherwise a shorter run would log no loss
        _leave_requeueing_to_us(self, given=plugins)
        own: list[pl.Callback] = self.callbacks  # pyright: ignore[reportAttributeAccessIssue]  (Lightning sets it from outside)
        if max_time is not None and not has_timer:
            own[:] = [RunTimer(max_time, interval="step") if type(item) is Timer else item for item in own]

    def to_fabric(self, callbacks: Optional[list[Any]] = None, loggers: Optional[list[Any]] = None) -> "Fabric":
        """Return a `Fabric` with the same devices, strategy and precision, for a loop that you write yourself.

        Raises:
            ConfigError: the strategy isn't `MegatronStrategy`, or has settings that `FabricMegatronStrategy` lacks.
        """
        from nemo2.fabric import to_fabric

        return to_fabric(self, callbacks, loggers)


def _leave_requeueing_to_us(trainer: pl.Trainer, *, given: Any) -> None:
    """Turn off Lightning's handling of SIGUSR1, unless the user passed an environment plugin (``given``).

    Lightning saves inside the signal handler, writes into the working directory, and calls scontrol on every rank.
    `PreemptionCallback` saves after the step instead, and the job script requests the requeue.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment not in _listed(given):
        environment.auto_requeue = False


def _precision_plugin(precision: Union[str, int], plugins: Any) -> MegatronMixedPrecision:
    if any(isinstance(plugin, Precision) for plugin in _listed(plugins)):
        raise ConfigError(
            f"trainer.precision={precision!r} and a precision plugin in trainer.plugins both set the precision. "
            "Remove one of them."
        )
    return MegatronMixedPrecision(precision)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_devices(*, accelerator: Any, devices: Any, num_nodes: int) -> None:
    """Check that this machine has the requested devices.

    Raises:
        ConfigError: GPUs are requested on a machine without any, or more CPU processes than were launched.
    """
    if not _no_gpu():
        return
    if accelerator in ("gpu", "cuda"):
        raise ConfigError(
            f"trainer.accelerator={accelerator!r}: this machine has no GPU. Set trainer.accelerator='auto' to train "
            "on GPUs where they exist and on CPU processes elsewhere."
        )
    if accelerator != "auto" or not isinstance(devices, int) or isinstance(devices, bool):
        return
    if devices * num_nodes > 1 and here().world_size == 1:
        raise ConfigError(
            f"trainer.devices={devices} with trainer.num_nodes={num_nodes}: this machine has no GPU, and only one "
            "process was started. To train on CPU processes, launch them (`nemo2 pretrain NAME --devices 2`, or "
            "run.LocalExecutor(launcher='torchrun', ntasks_per_node=2) with trainer.devices=2), or set "
            "trainer.devices=1."
        )


def _no_gpu() -> bool:
    return not torch.cuda.is_available()
