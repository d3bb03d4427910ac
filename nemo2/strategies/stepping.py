# SPDX-License-Identifier: Apache-2.0
"""One step under Lightning's loops: the schedule's forward and backward, the optimizer, and logging."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, Optional

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from nemo2.backend import get_backend
from nemo2.data.batch_sampler import EvalBatchSampler, StepBatchSampler
from nemo2.errors import ConfigError, DataError
from nemo2.models.tracked_losses import report_tracked_losses
from nemo2.optim.megatron import MegatronOptimizer
from nemo2.optim.sharded import ShardedOptimizer
from nemo2.parallel.hooks import CallbackConnector
from nemo2.parallel.megatron_parallel import MegatronParallel
from nemo2.run_dir.progress import ProgressPrinter, make_progress
from nemo2.strategies.not_finite import not_finite_in_our_words
from nemo2.strategies.timers import tell_timers
from nemo2.strategies.world import WorldStrategy, data_parallel_size

_log = logging.getLogger(__name__)
_SHOWN_SAMPLES = 16


class SteppingStrategy(WorldStrategy):
    """Run training, validation, test and prediction steps through `MegatronParallel`. To be subclassed."""

    megatron_parallel: Optional[MegatronParallel]
    megatron_callbacks: CallbackConnector
    replace_progress_bar: bool
    progress_interval: int
    _own_names: set[str]
    """Metrics that `_log_unless_the_module_did` has logged."""
    _skip_update: bool = False
    _tracked_microbatches: int = 0
    _unlogged: Optional[dict[str, Any]] = None
    """The metrics of the last step that are known without the device, or all of them, if that step wasn't logged."""
    """The micro-batches since Megatron-Core's loss trackers were last read."""

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        refuse_what_the_step_does_itself(model.trainer)

    def _replace_progress_bar(self, trainer: pl.Trainer) -> None:
        """Replace Lightning's default bar with nemo2's bar or line. The user's own bar stays."""
        bar = trainer.progress_bar_callback
        if type(bar) not in (TQDMProgressBar, RichProgressBar):
            return
        progress = make_progress(trainer)
        if isinstance(progress, ProgressPrinter):
            progress = ProgressPrinter(log_interval=self.progress_interval)
        trainer.callbacks[trainer.callbacks.index(bar)] = progress  # pyright: ignore[reportAttributeAccessIssue]

    def _take_over_backward(self, loop: _TrainingEpochLoop) -> None:
        # The schedule runs forward and backward together, so Lightning's zero_grad would erase the gradients.
        loop.automatic_optimization._skip_backward = True

    def _prepare_training(self, trainer: pl.Trainer) -> None:
        """What training needs of a model that is built and has no optimizer yet."""
        assert self.megatron_parallel is not None
        self._say_what_is_trained()
        self._take_over_backward(trainer.fit_loop.epoch_loop)
        get_backend().build_extensions(self.megatron_parallel.config, local_rank=self.local_rank)

    def _say_what_is_trained(self) -> None:
        counts = self.megatron_parallel.parameter_counts if self.megatron_parallel is not None else None
        if counts is not None and self.is_global_zero:
            _log.info("%s: %s.", type(self.lightning_module).__name__, counts)

    def _register(self, *objects: Any) -> None:
        self.megatron_callbacks.add(*(item for item in objects if item is not None))

    @contextmanager
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Generator[None, None, None]:
        """An empty context, because Megatron-Core places its own parameters."""
        yield

    def model_to_device(self) -> None:
        """Does nothing: the chunks were moved to the device before they were wrapped."""

    def batch_to_device(self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0) -> Any:
        """Return the batch unchanged: the data step moves one micro-batch at a time."""
        return batch

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True: a step accumulates the gradients of its micro-batches."""
        return True

    def training_step(self, batch: Any, batch_idx: Optional[int] = None, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over this rank's part of a global batch. Returns the reduced loss."""
        assert self.megatron_parallel is not None
        self.megatron_parallel.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        shape = self._batch_shape("train")
        try:
            with not_finite_in_our_words(self.trainer.global_step):
                loss = self.megatron_parallel.training_step(batch, step_i=self.trainer.global_step, **shape)
        except DataError as error:
            raise DataError(f"Step {self.trainer.global_step + 1}, {self._samples_of_step()}: {error}") from error
        self._tracked_microbatches += shape.get("num_microbatches", 1)
        self._last_loss = loss
        if not self.optimizers:
            self._log_step(None)
            # Lightning counts updates of its own optimizers only, and would never reach max_steps.
            progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            progress.increment_ready()
            progress.increment_completed()
        return loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (the step's forward and backward), then the update, then the logging."""
        loss = closure()
        trainer = self.trainer
        _call_hooks(trainer, "on_after_backward")
        _call_hooks(trainer, "on_before_optimizer_step", optimizer)
        if not isinstance(optimizer, MegatronOptimizer):
            _give_gradients(optimizer)
        if self._skip_update:
            self._skip_update = False
        else:
            optimizer.step()
        self._log_step(optimizer)
        return loss

    @property
    def last_loss(self) -> Tensor:
        """The loss of the current or the last step, reduced over the global batch. The same on every rank."""
        return self._last_loss

    def skip_update(self) -> None:
        """Skip the update of the current step. Every rank must call it before the optimizer steps."""
        self._skip_update = True

    def _log_step(self, optimizer: Optional[torch.optim.Optimizer]) -> None:
        """Log metrics under NeMo's names on the steps that Lightning logs. Other steps cost nothing.
        ``optimizer=None``: there is no optimizer."""
        trainer, module = self.trainer, self.lightning_module
        if module is None:
            return
        step = trainer.global_step
        known: dict[str, Any] = {"global_step": float(step), "step": float(step)}
        if optimizer is not None:
            known["lr"] = float(optimizer.param_groups[0]["lr"])
        if self.data_sampler is not None and getattr(self.data_sampler, "output_log", True):
            size = self.data_sampler.current_global_batch_size
            known |= {"consumed_samples": float(self.consumed_samples + size), "global_batch_size": float(size)}
        logs = (step + 1) % max(1, trainer.log_every_n_steps) == 0  # pyright: ignore[reportAttributeAccessIssue]
        if not logs and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._unlogged = known
            return
        self._refuse_empty_masks()
        metrics = self._step_metrics(optimizer, known)
        self._unlogged = None if logs else metrics
        for name, value in metrics.items():
            module.log(name, value, prog_bar=name in ("reduced_train_loss", "lr"), batch_size=1)

    def log_last_step(self) -> None:
        """Log the last step of training if it isn't a step that Lightning logs. Every rank calls it at the end of
        training."""
        known, self._unlogged = self._unlogged, None
        if known is None:
            return
        computed = "reduced_train_loss" in known
        metrics = known if computed else self._step_metrics(self.optimizers[0] if self.optimizers else None, known)
        values = {name: float(value) for name, value in metrics.items()}
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=int(known["step"]))

    def _step_metrics(self, optimizer: Optional[torch.optim.Optimizer], known: dict[str, Any]) -> dict[str, Any]:
        """``known`` and the metrics of the last step that the device computes."""
        metrics: dict[str, Any] = {"reduced_train_loss": self._last_loss.float(), **known}
        if isinstance(optimizer, (MegatronOptimizer, ShardedOptimizer)) and optimizer.grad_norm is not None:
            metrics["grad_norm"] = float(optimizer.grad_norm)
        if isinstance(optimizer, ShardedOptimizer) and optimizer.loss_scale is not None:
            metrics["loss_scale"] = optimizer.loss_scale
        if isinstance(optimizer, MegatronOptimizer):
            if optimizer.num_zeros_in_grad is not None:
                metrics["num_zeros_in_grad"] = float(optimizer.num_zeros_in_grad)
            if optimizer.config.fp16:
                metrics["loss_scale"] = float(optimizer.mcore_optimizer.get_loss_scale())
        if self.megatron_parallel is not None:
            tracked = report_tracked_losses(self.megatron_parallel.config, microbatches=self._tracked_microbatches)
            self._tracked_microbatches = 0
            metrics |= tracked
            tell_timers(self.megatron_parallel.config.timers, int(known["step"]) + 1)
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
        """The samples of the current step's global batch, by their indices in the dataset where they are known."""
        loader = self.trainer.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, StepBatchSampler):
            return "of a loader with batches of its own"
        indices = sampler.samples_of_step(self.consumed_samples)
        dataset = getattr(loader, "dataset", None)
        if (members := getattr(dataset, "samples_in", None)) is not None:
            indices = [sample for row in indices for sample in members(row)]
        shown = ", ".join(map(str, indices[:_SHOWN_SAMPLES]))
        more = f" and {len(indices) - _SHOWN_SAMPLES} more" if len(indices) > _SHOWN_SAMPLES else ""
        return f"whose global batch has the samples {shown}{more} of the dataset (counted from 0)"

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Optional[Tensor]:
        """The reduced loss of one global batch, logged as ``val_loss``. None: the module's step returns none.

        ``val_loss`` is the mean over batches, weighted by the number of tokens or samples in each mean. A batch that is
        half padding counts half.
        """
        assert self.megatron_parallel is not None and self.lightning_module is not None
        loss = self.megatron_parallel.validation_step(
            batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval")
        )
        self._log_unless_the_module_did(
            "val_loss", loss, self._samples_of(self.trainer.val_dataloaders, args, kwargs), prog_bar=True
        )
        return loss

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Optional[Tensor]:
        assert self.megatron_parallel is not None and self.lightning_module is not None
        loss = self.megatron_parallel.test_step(batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval"))
        self._log_unless_the_module_did(
            "test_loss", loss, self._samples_of(self.trainer.test_dataloaders, args, kwargs)
        )
        return loss

    def _log_unless_the_module_did(self, name: str, loss: Optional[Tensor], samples: int, **options: Any) -> None:
        """Log the weighted mean over batches under ``name``, if there is a loss and the module's own step hasn't logged
        the name.

        Lightning rejects a second value of a name. If a reduction doesn't define its weight, the batch's ``samples``
        are the weight.
        """
        assert self.lightning_module is not None
        if loss is None:
            return
        key = f"{self.lightning_module._current_fx_name}.{name}"
        if name not in self._own_names and key in (self.trainer._results or {}):
            return
        self._own_names.add(name)
        weight = self.megatron_parallel.weight if self.megatron_parallel is not None else None
        weight = samples if weight is None else int(weight)
        self.lightning_module.log(name, loss, on_step=False, on_epoch=True, batch_size=weight, **options)

    def _samples_of(self, loaders: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The samples of the dataset in the global batch of an evaluation step. 1: the loader isn't nemo2's."""
        loaders = loaders if isinstance(loaders, list) else [loaders]
        index = kwargs.get("dataloader_idx", args[1] if len(args) > 1 else 0)
        sampler = getattr(loaders[index] if index < len(loaders) else None, "batch_sampler", None)
        return sampler.samples_in(_batch_idx(args, kwargs)) if isinstance(sampler, EvalBatchSampler) else 1

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's ``predict_step`` (or ``forward_step``). Tensors of several micro-batches are
        concatenated, other results are in a list. None on ranks without the last pipeline stage."""
        assert self.megatron_parallel is not None
        return self.megatron_parallel.predict_step(batch, step_i=_batch_idx(args, kwargs), **self._batch_shape("eval"))

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
            num_microbatches = sampler.global_batch_size // (sampler.micro_batch_size * data_parallel_size())
        shape = {"num_microbatches": num_microbatches, "micro_batch_size": sampler.micro_batch_size}
        shape["seq_length"] = sampler.seq_len
        if sampler.decoder_seq_len is not None:
            shape["decoder_seq_length"] = sampler.decoder_seq_len
        return shape

    def on_validation_start(self) -> None:
        if self.megatron_parallel is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.megatron_parallel.pause_param_gather()

    def on_validation_end(self) -> None:
        if self.megatron_parallel is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.megatron_parallel.resume_param_gather()
            # Lightning puts all chunks into evaluation mode, but restores only the modules of the first chunk.
            for chunk in list(self.megatron_parallel)[1:]:
                chunk.train()

    def on_train_end(self) -> None:
        if self.megatron_parallel is not None:
            self.megatron_parallel.force_param_sync()


def refuse_what_the_step_does_itself(trainer: pl.Trainer) -> None:
    """Reject Lightning's own clipping and accumulation, which would have no effect.

    Raises:
        ConfigError: they are requested.
    """
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: nemo2 clips gradients inside the optimizer step. "
            f"Set optim.config.clip_grad={trainer.gradient_clip_val} of MegatronOptimizerModule instead, and leave "
            "trainer.gradient_clip_val unset."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: every step already accumulates the "
            "gradients of its micro-batches. Raise data.global_batch_size instead, and leave "
            "trainer.accumulate_grad_batches=1."
        )


def _batch_idx(args: tuple, kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("batch_idx", args[0] if args else 0) or 0)


def _call_hooks(trainer: pl.Trainer, name: str, *arguments: Any) -> None:
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, name, *arguments)
    call._call_lightning_module_hook(trainer, name, *arguments)


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set ``.grad`` for a torch optimizer, because Megatron-Core keeps gradients in its own buffers."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)
