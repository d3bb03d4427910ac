# SPDX-License-Identifier: Apache-2.0
"""Lightning's Fabric over `MegatronStrategy`: you write the loop, and everything else runs as under `Trainer`.

`FabricMegatronStrategy` holds a `MegatronStrategy` and a Lightning trainer that runs no loop. `nemo2.training.strategies.set_up`
does the setup. Each step is a call of the `MegatronParallel` that `Fabric.setup` returns:

    fabric.launch()
    model, optimizer = fabric.setup(model, optim)
    for batch in fabric.setup_dataloaders(loader):
        loss = model.training_step(batch)
        optimizer.step()
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional, Union

import fiddle as fdl
import lightning.fabric as lf
import lightning.pytorch as pl
import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import Strategy
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.config.aliases import aliases_of, parameter_names
from nemo2.config.capture import captured_arguments, configurable
from nemo2.data.sampler import DataSampler
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.optim.lr_scheduler import set_last_rates
from nemo2.mcore.optim.megatron import MegatronOptimizerModule
from nemo2.mcore.parallel.groups import collective_timeout
from nemo2.mcore.parallel.hooks import CallbackConnector
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel, MegatronStep
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.training.strategies.set_up import set_up
from nemo2.training.strategy import MegatronStrategy


class FabricMegatronMixedPrecision(MegatronMixedPrecision):
    """NeMo's name for `MegatronMixedPrecision` under Fabric, which takes the same plugin."""


@configurable(ddp_config="ddp")
class FabricMegatronStrategy(DDPStrategy):
    """Train under Lightning's Fabric with `MegatronStrategy`.

    The parameters are NeMo 2.0's, and can be read as attributes. Parameters that are not listed here are those of
    `MegatronStrategy`.

    Args:
        accelerator, parallel_devices, cluster_environment: As in Lightning's Fabric strategies.
        checkpoint_io, precision, process_group_backend, timeout: As in Lightning's Fabric strategies.
        megatron_callbacks: The callbacks that receive the hooks of each step.
        start_method: "popen".
        no_ddp_communication_hook: Must be True, because torch's DDP isn't used.
        output_data_idx: Must be False, because a loader's items are batches.

    Raises:
        ConfigError: an error of `MegatronStrategy`, or another value of the last three arguments.
    """

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: Optional[int] = None,
        pipeline_model_parallel_comm_backend: Optional[str] = None,
        microbatch_group_size_per_vp_stage: Optional[int] = None,
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        expert_model_parallel_size: int = 1,
        moe_extended_tp: bool = False,
        expert_tensor_parallel_size: Optional[int] = None,
        encoder_tensor_model_parallel_size: Optional[int] = 0,
        encoder_pipeline_model_parallel_size: Optional[int] = 0,
        data_sampler: Optional[DataSampler] = None,
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision: Optional[Precision] = None,
        megatron_callbacks: Optional[CallbackConnector] = None,
        ddp: Union[Literal["megatron"], DistributedDataParallelConfig] = "megatron",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = None,
        start_method: Literal["popen"] = "popen",
        no_ddp_communication_hook: bool = True,
        output_data_idx: bool = False,
        pipeline_dtype: Optional[torch.dtype] = None,
        init_model_parallel: bool = True,
        use_tp_pp_dp_mapping: bool = False,
        num_distributed_optimizer_instances: int = 1,
        nccl_communicator_config_path: Optional[str] = None,
    ) -> None:
        own = locals()
        arguments: dict[str, Any] = {name: own[name] for name in parameter_names(MegatronStrategy) if name in own}
        for name, only in (("start_method", "popen"), ("output_data_idx", False), ("no_ddp_communication_hook", True)):
            if own[name] != only:
                raise ConfigError(f"FabricMegatronStrategy({name}={own[name]!r}): must be {only!r}. Leave it unset.")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend or get_backend().process_group_backend,
            timeout=timeout or collective_timeout(),
        )
        arguments |= {"setup_optimizers": False, "replace_progress_bar": False, "ckpt_async_save": False}
        self.training = MegatronStrategy(**arguments)
        """The strategy that `Trainer` would run."""
        if megatron_callbacks is not None:
            self.training.megatron_callbacks.add(megatron_callbacks)
        self._trainer: Optional[pl.Trainer] = None
        self._open = ExitStack()

    def __getattr__(self, name: str) -> Any:
        is_parameter = name in parameter_names(type(self)) or name in aliases_of(type(self))
        if not is_parameter or "training" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in parameter_names(MegatronStrategy) or hasattr(self.training, name):
            return getattr(self.training, name)
        return (captured_arguments(self) or {}).get(name, inspect.signature(type(self)).parameters[name].default)

    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes > 1:  # a single process launches no others, as under Trainer
            super()._configure_launcher()

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of this strategy. It runs no loop, but counts steps and knows devices and ranks."""
        if self._trainer is None:
            on_cpu = self.root_device.type == "cpu"
            plugins = [self.cluster_environment, self.precision]
            self._trainer = pl.Trainer(
                accelerator="cpu" if on_cpu else "gpu",
                devices=self.num_processes if on_cpu else [device.index for device in self.parallel_devices or ()],
                num_nodes=self.num_nodes,
                strategy=self.training,
                plugins=[one for one in plugins if isinstance(one, ClusterEnvironment | MegatronMixedPrecision)],
                max_steps=-1,
                num_sanity_val_steps=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        return self._trainer

    def setup_environment(self) -> None:
        """Set the device and create the process group. Megatron-Core's groups follow with the model, because its
        experts decide them."""
        self._set_world_ranks()
        assert self.trainer is not None
        get_backend().install()
        get_backend().set_device(self.root_device)
        self.training.setup_distributed()

    def setup_module(self, module: Any) -> MegatronParallel:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This rank's chunks, wrapped for training. Each call of their ``training_step`` zeroes the gradients first.

        Raises:
            ConfigError: the strategy already holds a model, or a setting can't work.
        """
        if self.training.megatron_parallel is not None:
            raise ConfigError("FabricMegatronStrategy supports one model. Create another Fabric for the next model.")
        parallel = self._open.enter_context(set_up(self.trainer, module, stage="fit"))
        self.training.megatron_callbacks.add(_OwnLoop(self.training))
        return parallel

    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Optional[Any]]:
        """The optimizer of the model's ``optim`` and its schedule, or None without a schedule.

        Raises:
            ConfigError: an error of `MegatronStrategy.setup_optimizers`.
        """
        self.training.setup_optimizers(self.trainer)
        configs = self.training.lr_scheduler_configs
        return self.training.optimizers[0], configs[0].scheduler if configs else None

    def setup_megatron_optimizer(
        self,
        model: MegatronParallel,
        optimizer_config: OptimizerConfig,
        no_weight_decay_cond: Optional[Callable] = None,
        scale_lr_cond: Optional[Callable] = None,
        lr_mult: float = 1.0,
    ) -> torch.optim.Optimizer:
        """Make Megatron-Core's optimizer for a model that `setup_module` returned.

        Raises:
            ConfigError: only one of the optimizer's state and the model's gradient buffers is sharded.
        """
        module: Any = model.pl_module
        sharded = self.training.ddp_config.use_distributed_optimizer
        if optimizer_config.use_distributed_optimizer != sharded:
            raise ConfigError(
                f"optimizer_config.use_distributed_optimizer={optimizer_config.use_distributed_optimizer}, but the "
                f"gradient buffers were created for {sharded}. Set the same value in FabricMegatronStrategy(ddp=...), "
                "or pass the optimizer with the model: fabric.setup(model, MegatronOptimizerModule(...))."
            )
        module_of_optimizer = MegatronOptimizerModule(
            optimizer_config, None, no_weight_decay_cond, scale_lr_cond, lr_mult
        )
        module_of_optimizer.connect(module)
        self.training.settle(module)
        return self.make_optimizer()[0]

    def process_datamodule(self, datamodule: pl.LightningDataModule) -> pl.LightningDataModule:
        """Use the data module's sampler to split batches."""
        self.training.data_sampler = self.training.data_sampler or getattr(datamodule, "data_sampler", None)
        sampler = self.training.data_sampler
        if sampler is not None and self.training.megatron_parallel is not None:
            sampler.connect(self.trainer)
            sampler.setup(self.global_rank)
        return datamodule

    def process_dataloader(self, dataloader: Any) -> Any:
        return self.training.process_dataloader(dataloader)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self.training.distributed_sampler_kwargs

    def save_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: Union[str, Path], state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a checkpoint in `Trainer`'s format, with the other values of ``state``: of objects with a ``state_dict``
        that state. An optimizer in ``state`` is saved too, with its schedule.

        Raises:
            ConfigError: ``filter`` is set, which Megatron-Core's sharded state doesn't support, or ``state`` has a module beside
                the model, whose state may differ between ranks.
        """
        if filter:
            raise ConfigError(
                "fabric.save(filter=...) is not supported. Set strategy.ckpt_save_part to save a part of the model."
            )
        own = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items()
            if not self._is_kept_in_form(name, value)
        }
        with_optimizer = {}
        if _has_optimizer(state):
            schedules = [config.scheduler.state_dict() for config in self.training.lr_scheduler_configs]
            with_optimizer = {"optimizer_states": [], "lr_schedulers": schedules}
        self.training.save_checkpoint({"fabric": own, **with_optimizer}, path, storage_options)

    def _is_kept_in_form(self, name: str, value: Any) -> bool:
        """Whether ``value`` is the model or its optimizer. Another module is refused."""
        if not isinstance(value, nn.Module):
            return isinstance(value, torch.optim.Optimizer)
        parallel = self.training.megatron_parallel
        assert parallel is not None
        if not any(value is module for whole in (parallel, parallel.pl_module) for module in whole.modules()):
            raise ConfigError(
                f"fabric.save(state): {name!r} is a module, {type(value).__name__}, beside the model. Its state may differ "
                "between ranks, and one rank's would be saved. Leave it out, or pass the values that all ranks share."
            )
        return True

    def load_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: Union[str, Path], state: Any = None, strict: bool = True, weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        """Load the model, the counts of steps and samples, and the optimizer with its schedule if ``state`` holds one, from a
        checkpoint of nemo2.

        Other names in ``state`` receive their saved values, and objects with a ``load_state_dict`` load them. Returns the
        saved values without a name in ``state``.
        """
        state = state if isinstance(state, dict) else {"model": state}
        self.training.form.load_optimizer = _has_optimizer(state)
        self.trainer.ckpt_path = str(path)
        loaded = self.training.load_checkpoint(path)
        self.training.load_model_state_dict(loaded, strict=strict)
        _progress(self.trainer).total.completed = (loaded.get("nemo2") or {}).get("global_step", 0)
        if _has_optimizer(state):
            # None in checkpoints of earlier versions, whose schedules go on at the number of steps.
            saved = loaded.get("lr_schedulers")
            for index, config in enumerate(self.training.lr_scheduler_configs):
                if saved is None:
                    config.scheduler.step(self.trainer.global_step)  # pyright: ignore[reportCallIssue]
                else:
                    config.scheduler.load_state_dict(saved[index])
        own = dict(loaded.get("fabric") or {})
        for name in [name for name in own if name in state]:
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(own.pop(name))
                set_last_rates(state[name])
            else:
                state[name] = own.pop(name)
        return own

    def start_from(self, path: Union[str, Path]) -> None:
        """Load weights only, from a checkpoint of nemo2 or NeMo, or from released weights.

        Raises:
            CheckpointError: the weights don't fit the model.
        """
        self.training.restore_config = RestoreConfig(path=str(path))
        self.training.refuse_unfit_weights()
        self.training.selective_restore()


class _OwnLoop:
    """The work of `MegatronStrategy`'s hooks around a step, for a loop without Lightning's hooks."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        self._strategy = strategy

    def on_megatron_step_start(self, step: MegatronStep) -> MegatronStep:
        for name, value in self._strategy._batch_shape("eval" if step.forward_only else "train").items():
            setattr(step, name, value)
        if step.forward_only:
            step.pipeline.pause_param_gather()
            return step
        step.pipeline.zero_grad_buffer()
        for optimizer in self._strategy.optimizers:
            optimizer.zero_grad()
        return step

    def on_megatron_step_end(self, step: MegatronStep) -> None:
        if step.forward_only:
            step.pipeline.resume_param_gather()
        else:
            _progress(self._strategy.trainer).increment_completed()


@configurable
class Fabric(lf.Fabric):
    """Run your own training loop with Lightning's Fabric. The arguments are Lightning's.

    With `FabricMegatronStrategy`, ``precision`` is short for ``plugins=FabricMegatronMixedPrecision(precision)``, and
    `setup` returns the model as a `MegatronParallel`.

    Args:
        accelerator: "cpu", "gpu" or an accelerator object. "auto": GPUs where the machine has any, else CPU processes.
        strategy: A strategy such as `FabricMegatronStrategy`, or the name of one of Lightning's.
        devices: Processes per node, or a list of GPU numbers. -1 or "auto": all devices.
        num_nodes: Machines.
        precision: The precision, such as "bf16-mixed". None: that of ``plugins``, else 32 bit.
        plugins: A precision or cluster plugin, or a list of plugins. None: no plugins.
        callbacks: Objects whose methods `Fabric.call` calls. None: no callbacks.
        loggers: Lightning's loggers, for `Fabric.log`. None: no logger.
    """

    def __init__(
        self,
        *,
        accelerator: Union[str, Accelerator] = "auto",
        strategy: Union[str, Strategy] = "auto",
        devices: Union[list[int], str, int] = "auto",
        num_nodes: int = 1,
        precision: Optional[Union[str, int]] = None,
        plugins: Optional[Union[Any, list[Any]]] = None,
        callbacks: Optional[Union[list[Any], Any]] = None,
        loggers: Optional[Union[Any, list[Any]]] = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if isinstance(strategy, FabricMegatronStrategy) and precision is not None:
            listed = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
            arguments |= {"plugins": [*listed, FabricMegatronMixedPrecision(precision)], "precision": None}
        if accelerator == "auto" and not torch.cuda.is_available():
            arguments["accelerator"] = "cpu"
        super().__init__(**arguments)

    def setup(self, module: nn.Module, *optimizers: Any, scheduler: Optional[Any] = None, **options: Any) -> Any:
        """Set up a model and its optimizer, as Lightning does.

        With `FabricMegatronStrategy` the optimizer is an `OptimizerModule` such as `MegatronOptimizerModule`.

        Returns:
            The model. With an optimizer: the tuple ``(model, optimizer)``. With a schedule in the optimizer: ``(model,
            optimizer, schedule)``; the loop calls ``schedule.step()``.

        Raises:
            ConfigError: several optimizers, or an optimizer that is already built.
        """
        strategy = self.strategy
        if not isinstance(strategy, FabricMegatronStrategy):
            return super().setup(module, *optimizers, scheduler=scheduler, **options)
        if (
            scheduler is not None
            or len(optimizers) > 1
            or not all(isinstance(one, OptimizerModule) for one in optimizers)
        ):
            raise ConfigError(
                "fabric.setup(model, optim): with FabricMegatronStrategy, optim must be one OptimizerModule with its schedule, "
                "such as MegatronOptimizerModule(config, lr_scheduler), because it creates the optimizer for sharded parameters."
            )
        if not optimizers:
            return self.setup_module(module)
        optimizers[0].connect(module)  # pyright: ignore[reportArgumentType]
        parallel = self.setup_module(module)
        optimizer, schedule = strategy.make_optimizer()
        return (parallel, optimizer) if schedule is None else (parallel, optimizer, schedule)

    def setup_module(self, module: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Set up a model without an optimizer, as Lightning does. With `FabricMegatronStrategy` it returns a
        `MegatronParallel`."""
        if not isinstance(self.strategy, FabricMegatronStrategy):
            return super().setup_module(module, *arguments, **options)
        self._validate_setup_module(module)
        self._models_setup += 1
        return self.strategy.setup_module(module)

    def setup_datamodule(self, datamodule: pl.LightningDataModule, stage: str = "") -> pl.LightningDataModule:
        """Prepare the data module and use its sampler to split batches. Call this before `setup`."""
        datamodule.setup(stage)
        process = getattr(self.strategy, "process_datamodule", None)
        return datamodule if process is None else process(datamodule)

    def setup_dataloaders(self, *dataloaders: Any, **options: Any) -> Any:
        """Set up loaders, as Lightning does. With `FabricMegatronStrategy` the data sampler splits batches, and the
        data step moves them to the device."""
        if isinstance(self.strategy, FabricMegatronStrategy):
            sampled = self.strategy.training.data_sampler is not None
            options = {"use_distributed_sampler": not sampled, **options, "move_to_device": False}
        return super().setup_dataloaders(*dataloaders, **options)

    def backward(self, tensor: torch.Tensor, *args: Any, model: Optional[Any] = None, **kwargs: Any) -> None:
        """Run backward, as Lightning does.

        Raises:
            ConfigError: with `FabricMegatronStrategy`, because ``training_step`` has already run backward for its
                micro-batches.
        """
        if isinstance(self.strategy, FabricMegatronStrategy):
            raise ConfigError(
                "fabric.backward: model.training_step(batch) has already run the backward pass. Remove this call."
            )
        super().backward(tensor, *args, model=model, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients, as Lightning does.

        Raises:
            ConfigError: with `FabricMegatronStrategy`, whose optimizer clips in its step.
        """
        if isinstance(self.strategy, FabricMegatronStrategy):
            raise ConfigError(
                "fabric.clip_gradients: Megatron-Core clips in its optimizer step. Set optim.config.clip_grad."
            )
        return super().clip_gradients(*args, **kwargs)

    def load_model(self, path: Union[str, Path], model: Optional[Any] = None) -> Any:
        """Set up a model with the weights of a checkpoint of nemo2 or NeMo 2.0, of ``nemo://name``, or of released
        ``hf://`` weights.

        Args:
            path: The checkpoint or the released weights.
            model: The model to fill. None: the model that the checkpoint describes.
        """
        self.launch()
        checkpoint = Checkpoint.open(path)
        described: Any = model if model is not None else fdl.build(checkpoint.model_config())
        parallel = self.setup_module(described)
        self.strategy.start_from(checkpoint.source)  # pyright: ignore[reportAttributeAccessIssue]
        return parallel

    def import_model(self, path: Union[str, Path], model_type: type) -> Any:
        """Import a released model (``hf://organisation/name``, ``hf:///folder``) and set it up.

        Raises:
            ConfigError: the model is not an instance of ``model_type``.
        """
        from nemo2.hugging_face.api import import_ckpt

        imported = import_ckpt(source=str(path))
        model: Any = fdl.build(Checkpoint.open(imported).model_config())
        if not isinstance(model, model_type):
            raise ConfigError(
                f"model_type={model_type.__name__}: {path} contains a {type(model).__name__}. Set model_type to its class."
            )
        return self.load_model(imported, model)


_OF_A_TRAINER = {"gradient_as_bucket_view", "progress_interval", "replace_progress_bar", "setup_optimizers"}
"""Arguments of `MegatronStrategy` without a meaning in your own loop. Such a loop creates an optimizer when
`Fabric.setup` receives one."""


def to_fabric(
    obj: Any, callbacks: Optional[list[Any]] = None, loggers: Optional[list[Any]] = None
) -> Union[Fabric, FabricMegatronStrategy, FabricMegatronMixedPrecision]:
    """Return the counterpart in Fabric of a trainer (see `Trainer.to_fabric`), a `MegatronStrategy` or a
    `MegatronMixedPrecision`.

    Raises:
        ConfigError: there is none.
    """
    if _is_megatron(obj):
        return FabricMegatronMixedPrecision(**(captured_arguments(obj) or {}))
    strategy = obj.strategy if isinstance(obj, pl.Trainer) else obj
    if not isinstance(strategy, MegatronStrategy):
        raise ConfigError(
            f"to_fabric: {type(strategy).__name__} has no counterpart in Fabric. Create Fabric(strategy=...) with one of "
            "Lightning's strategies."
        )
    names = parameter_names(FabricMegatronStrategy)
    captured = captured_arguments(strategy) or {}
    if lost := sorted(captured.keys() - set(names) - _OF_A_TRAINER):
        raise ConfigError(f"to_fabric: FabricMegatronStrategy has no {', '.join(lost)}. Leave it unset.")
    converted = FabricMegatronStrategy(**{name: value for name, value in captured.items() if name in names})
    if obj is strategy:
        return converted
    arguments, precision = captured_arguments(obj) or {}, obj.precision_plugin
    plugins = FabricMegatronMixedPrecision(**(captured_arguments(precision) or {})) if _is_megatron(precision) else None
    return Fabric(
        accelerator=arguments.get("accelerator", "auto"),
        devices=arguments.get("devices", "auto"),
        num_nodes=arguments.get("num_nodes", 1),
        strategy=converted,
        plugins=plugins,
        callbacks=callbacks,
        loggers=loggers,
    )


def _is_megatron(precision: Any) -> bool:
    return isinstance(precision, MegatronMixedPrecision)


def _progress(trainer: pl.Trainer) -> Any:
    """Lightning's counter of optimizer steps, which `global_step` reads."""
    return trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step


def _has_optimizer(state: dict[str, Any]) -> bool:
    return any(isinstance(one, torch.optim.Optimizer) for one in state.values())
