# SPDX-License-Identifier: Apache-2.0
"""Tells Nsight Systems which steps to record."""

import logging
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.callbacks.steps import step_range_problems, whose_ranks
from nemo2.config.capture import configurable
from nemo2.errors import ConfigError

logger = logging.getLogger(__name__)


@configurable
class NsysCallback(pl.Callback):
    """Starts and stops CUDA's profiler, for a run under ``nsys profile --capture-range=cudaProfilerApi``, and marks steps.

    Hooks: training batch start and end, and the end of training or a failure. On a machine without a GPU there is nothing to
    record: that is said once, and the run goes on, so that a recipe can be tried on a laptop with its callbacks.

    Args:
        start_step: The first step that is recorded, counted from 0.
        end_step: The first step that isn't any more.
        ranks: Global ranks that are recorded. None: rank 0.
        gen_shape: Tensor shapes at every operator's range; slow.
        nvtx_ranges: Megatron-Core's own ranges for parts of a layer and of the optimizer step.

    Raises:
        ConfigError: steps or ranks that can't be.
    """

    def __init__(
        self,
        start_step: int,
        end_step: int,
        ranks: Optional[list[int]] = None,
        gen_shape: bool = False,
        nvtx_ranges: bool = False,
    ) -> None:
        problems = step_range_problems("NsysCallback", start_step, end_step)
        self.ranks = whose_ranks("NsysCallback", ranks, problems)
        if problems:
            raise ConfigError("\n".join(problems))
        self.start_step = start_step
        self.end_step = end_step
        self.gen_shape = gen_shape
        self.nvtx_ranges = nvtx_ranges
        self._ranges: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank in self.ranks and not _has_gpu():
            logger.warning("NsysCallback records GPUs, and this machine has none: nothing is recorded.")
        absent = [rank for rank in self.ranks if rank >= trainer.world_size]
        if absent and trainer.is_global_zero:
            logger.warning("NsysCallback.ranks=%s: this run has %d ranks only.", absent, trainer.world_size)
        if self.nvtx_ranges:
            from megatron.core.utils import configure_nvtx_profiling

            configure_nvtx_profiling(True)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._records(trainer):
            return
        import torch

        if self._ranges is None and self.start_step <= trainer.global_step < self.end_step:
            torch.cuda.synchronize()  # what earlier steps still do is not of this recording
            _profiler().cudaProfilerStart()
            self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=self.gen_shape)
            self._ranges.__enter__()
        if self._ranges is not None:
            torch.cuda.nvtx.range_push(f"step {trainer.global_step}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ranges is None:
            return
        import torch

        torch.cuda.nvtx.range_pop()
        if trainer.global_step >= self.end_step:
            self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _records(self, trainer: pl.Trainer) -> bool:
        return trainer.global_rank in self.ranks and _has_gpu()

    def _stop(self) -> None:
        if self._ranges is None:
            return
        import torch

        ranges, self._ranges = self._ranges, None
        torch.cuda.synchronize()
        ranges.__exit__(None, None, None)
        _profiler().cudaProfilerStop()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _profiler() -> Any:
    import torch

    return torch.cuda.cudart()
