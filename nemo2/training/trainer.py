# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer, which records its arguments and checks them against this machine before anything starts."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Optional, Union, cast

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

from nemo2.base.advice import advice
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.base.place import here
from nemo2.config.arguments import misplaced_text
from nemo2.config.capture import configurable
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.world import World, devices_of
from nemo2.training.strategies.base import BaseStrategy

if TYPE_CHECKING:
    from nemo2.training.fabric import Fabric

_Plugin = Union[Precision, ClusterEnvironment, CheckpointIO, LayerSync]


@configurable
class Trainer(pl.Trainer):
    """Run training, validation and testing with Lightning's Trainer. The arguments are Lightning's. Four of them behave
    differently here: ``val_check_interval``, ``check_val_every_n_epoch``, ``num_sanity_val_steps`` and ``max_time``.

    With a strategy of nemo2, the trainer has a logger, a model summary and a checkpoint callback only if you ask for
    them.

    Args:
        accelerator: "cpu", "gpu" or an accelerator object. "auto": GPUs where the machine has any, and CPU processes
            elsewhere.
        strategy: A strategy of nemo2, such as `MegatronStrategy`, or one of Lightning's by name or object.
        devices: Processes per node, or a list of GPU numbers. -1 or "auto": all devices of a node.
        num_nodes: Machines.
        precision: The precision, such as "bf16-mixed". None: that of ``plugins``, else 32 bit. With a strategy of nemo2
            this is short for ``plugins=MegatronMixedPrecision(precision)``.
        logger: A logger of Lightning, or several. True: Lightning's default. False: no logger. None: True, with a
            strategy of nemo2 False.
        callbacks: One callback or a list. None: no callbacks.
        fast_dev_run: Run only this many batches of each loop, without logging and checkpoints. True: one batch.
        max_epochs: The last epoch. None: no limit if another limit is set, else 1000. -1: no limit.
        min_epochs: Epochs to train at least. None: no minimum.
        max_steps: The number of optimizer steps, over all resumed runs together. -1: no limit.
        min_steps: Optimizer steps to train at least. None: no minimum.
        max_time: Stop after this time: "DD:HH:MM:SS", a ``timedelta`` or a dictionary of its arguments. The time starts
            from zero in each run that resumes. None: no limit.
        limit_train_batches: Batches per epoch, or as a float their fraction. The next epoch goes on behind them. None: all
            batches.
        limit_val_batches: Batches per validation, or as a float their fraction. None: all batches.
        limit_test_batches: Batches per test, or as a float their fraction. None: all batches.
        limit_predict_batches: Batches per prediction, or as a float their fraction. None: all batches.
        overfit_batches: Train on the same batches in each epoch, in the same order: the first ones of the dataset, this
            many, or as a float their fraction. Validation takes as many of its own data, unless ``limit_val_batches`` is 0.
            0: all batches.
        val_check_interval: An integer: optimizer steps between validations, over the whole run rather than within an
            epoch. It may exceed an epoch. A float: the fraction of an epoch. A text, ``timedelta`` or dictionary: the
            time, as in ``max_time``. None: 1.0.
        check_val_every_n_epoch: Epochs between validations. None: 1, and with an integer ``val_check_interval`` epochs
            don't count.
        num_sanity_val_steps: Validation batches before training begins. -1: all batches. None: 0, because pipelines
            need a training step first.
        log_every_n_steps: Steps between two logged steps. None: 50.
        enable_checkpointing: Add Lightning's checkpoint callback if ``callbacks`` has none. None: True, with a strategy
            of nemo2 False.
        enable_progress_bar: Show the progress. None: True.
        enable_model_summary: Print a summary of the model before training. None: True, with a strategy of nemo2 False.
        accumulate_grad_batches: Batches per optimizer step. With a strategy of nemo2 it must be 1, because
            ``data.global_batch_size`` sets the micro-batches of a step.
        gradient_clip_val: The largest norm or value of gradients. With a strategy of nemo2 it must be unset, because
            ``optim.config.clip_grad`` clips. None: no clipping by the trainer.
        gradient_clip_algorithm: "norm" or "value". None: "norm".
        deterministic: Use deterministic kernels. "warn": warn where there is none. None: False.
        benchmark: The value of ``torch.backends.cudnn.benchmark``. None: it stays as it is.
        inference_mode: Run validation, test and prediction under ``torch.inference_mode``. False: under
            ``torch.no_grad``.
        use_distributed_sampler: Split plain loaders by rank. Data modules with a ``data_sampler`` split their batches
            by data-parallel rank in any case.
        profiler: A profiler of Lightning, or its name: "simple", "advanced", "pytorch". None: no profiler.
        detect_anomaly: Let autograd report the operation whose gradient is not a number. Slow.
        barebones: Turn off all features that slow the loop, to measure Lightning's own time.
        plugins: A precision, cluster or checkpoint plugin, such as `MegatronMixedPrecision`, or a list of plugins.
            None: no plugins.
        sync_batchnorm: Synchronize batch norms over ranks. Under nemo2's strategies the model must do it itself: one with other
            batch norms is refused when training begins.
        reload_dataloaders_every_n_epochs: Epochs after which the data module makes new loaders. 0: never.
        default_root_dir: The folder for files without another folder. None: the working directory.
        enable_autolog_hparams: Log the arguments that modules saved with ``save_hyperparameters``.

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
        if sentences := misplaced_text(Trainer, arguments, of="trainer."):
            raise ConfigError("\n".join(sentences), rule="parts-are-no-text")
        num_nodes = arguments["num_nodes"] = 1 if num_nodes is None else num_nodes
        # torch's switches take neither 0 and 1 nor None.
        arguments["detect_anomaly"] = bool(detect_anomaly)
        arguments["benchmark"] = None if benchmark is None else bool(benchmark)
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
        if isinstance(strategy, BaseStrategy):
            if precision is not None:
                # Lightning's own plugin casts in hooks that the pipeline schedule bypasses, so it would have no effect.
                if any(isinstance(plugin, Precision) for plugin in _listed(plugins)):
                    raise ConfigError(
                        f"trainer.precision={precision!r} and a precision plugin in trainer.plugins both set the "
                        "precision. Remove one of them."
                    )
                arguments |= {"plugins": [*_listed(plugins), MegatronMixedPrecision(precision)], "precision": None}
            if strategy.accelerator is not None:
                raise ConfigError(
                    f"strategy: this {type(strategy).__name__} already belongs to another Trainer. Create a strategy "
                    "for each trainer."
                )
            # Lightning's checkpoint callback writes single files, its summary counts only this rank's shard, and its
            # default logger creates a folder beside the run's. The run directory provides all three.
            callback_list = _listed(callbacks)
            if enable_checkpointing is None and not any(isinstance(item, Checkpoint) for item in callback_list):
                arguments["enable_checkpointing"] = False
            arguments["enable_model_summary"] = bool(enable_model_summary)
            arguments["logger"] = False if logger is None else logger
        has_timer = any(isinstance(item, Timer) for item in _listed(callbacks))
        # A list of its own, because Lightning appends its callbacks to it, and the user's says what the user set.
        arguments["callbacks"] = _listed(callbacks)
        super().__init__(**arguments)
        if overfit_batches and limit_val_batches == 0:
            self.limit_val_batches = 0  # Lightning would validate on as many batches
        if 0 < max_steps < self.log_every_n_steps:  # pyright: ignore[reportAttributeAccessIssue]
            self.log_every_n_steps = max_steps  # otherwise a shorter run would log no loss
        environment = self._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment not in _listed(plugins):
            # Lightning's handler of SIGUSR1 saves inside the handler, writes into the working directory, and calls scontrol
            # on every rank. `PreemptionCallback` saves after the step instead, and the job script requests the requeue.
            environment.auto_requeue = False
        own: list[pl.Callback] = self.callbacks  # pyright: ignore[reportAttributeAccessIssue]  (Lightning sets it from outside)
        if max_time is not None and not has_timer:
            own[:] = [_RunTimer(max_time, interval="step") if type(item) is Timer else item for item in own]

    def to_fabric(self, callbacks: Optional[list[Any]] = None, loggers: Optional[list[Any]] = None) -> "Fabric":
        """Return a `Fabric` with the same devices, strategy and precision, for a loop that you write yourself.

        Raises:
            ConfigError: the strategy isn't `MegatronStrategy`, or has settings that `FabricMegatronStrategy` lacks.
        """
        from nemo2.training.fabric import to_fabric

        return cast("Fabric", to_fabric(self, callbacks, loggers))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_devices(*, accelerator: Any, devices: Any, num_nodes: int) -> None:
    """Check that this machine has the requested devices.

    Raises:
        ConfigError: more GPUs are requested than the machine has, or more CPU processes than were launched.
    """
    if not _no_gpu():
        countable = isinstance(devices, (int, list, tuple))
        if accelerator in ("auto", "gpu", "cuda") and countable and (missing := missing_gpus(devices)):
            raise ConfigError(missing)
        return
    if accelerator in ("gpu", "cuda"):
        raise ConfigError(
            f"trainer.accelerator={accelerator!r}: this machine has no GPU. Set trainer.accelerator='auto' to train "
            "on GPUs where they exist and on CPU processes elsewhere."
        )
    if accelerator != "auto" or not isinstance(devices, int) or isinstance(devices, bool):
        return
    if World(num_nodes, devices).size > 1 and here().world_size == 1:
        raise ConfigError(
            f"trainer.devices={devices} with trainer.num_nodes={num_nodes}: this machine has no GPU, and only one "
            "process was started. To train on CPU processes, launch them ("
            f"{advice('nemo2 pretrain NAME --devices 2', 'launch(recipe, devices=2)')}), or set trainer.devices=1."
        )


def missing_gpus(devices: Union[int, Sequence[int]]) -> str:
    """The error for a number of ranks on this machine, or for the indices of their GPUs, if it has GPUs and fewer of them,
    else an empty text."""
    gpus = 0 if _no_gpu() else torch.cuda.device_count()
    needed = (
        devices
        if isinstance(devices, int)
        else 1 + max((index for index in devices if isinstance(index, int)), default=-1)
    )
    if not 0 < gpus < needed:
        return ""
    sees = f"this process sees {counted(gpus, 'GPU')}"
    if not isinstance(devices, int):
        return (
            f"trainer.devices={list(devices)}: {sees}, with indices from 0 to {gpus - 1}. Use these, or make more visible in "
            "CUDA_VISIBLE_DEVICES."
        )
    return (
        f"trainer.devices={devices}: a rank needs a GPU of its own, and {sees}. Use "
        f"{advice('--devices', 'trainer.devices')}={gpus} and parallel sizes that divide it, run on a machine with more GPUs, "
        "or make more of them visible in CUDA_VISIBLE_DEVICES."
    )


def _no_gpu() -> bool:
    return not torch.cuda.is_available()


class _RunTimer(Timer):
    """End training after this process has trained for ``max_time``, so that each job of a chain continues the previous
    one.

    Lightning's timer includes the time of earlier runs. Once a run reaches the limit, running the same command again
    would end without a step. To get that behavior, add Lightning's `Timer` to the callbacks.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: no time is carried over."""
