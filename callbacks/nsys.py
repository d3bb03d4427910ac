# SPDX-License-Identifier: Apache-2.0
"""Selects the steps that Nsight Systems records."""

import logging
from typing import Any, Optional

import lightning.pytorch as pl
import torch

from nemo2.base.errors import ConfigError
from nemo2.callbacks.steps import chosen_ranks, step_range_problems, warn_of_absent_ranks
from nemo2.config.capture import configurable

logger = logging.getLogger(__name__)


@configurable
class NsysCallback(pl.Callback):
    """Start and stop CUDA's profiler and mark steps, for a run under ``nsys profile --capture-range=cudaProfilerApi``.

    Hooks: start and end of each training batch, end of training, and failures. On a machine without a GPU the callback
    reports once that it records nothing, and the run continues.

    Args:
        start_step: The first recorded step, counted from 0.
        end_step: The step before which recording ends.
        ranks: The global ranks to record. None: rank 0.
        gen_shape: Record tensor shapes for every operator. Slow.
        nvtx_ranges: Record Megatron-Core's ranges for parts of a layer and of the optimizer step.

    Raises:
        ConfigError: steps or ranks that can't work.
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
        self.ranks = chosen_ranks("NsysCallback", ranks, problems)
        if problems:
            raise ConfigError("\n".join(problems))
        self.start_step = start_step
        self.end_step = end_step
        self.gen_shape = gen_shape
        self.nvtx_ranges = nvtx_ranges
        self._ranges: Any = None
        self._recorded = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank in self.ranks and not _has_gpu():
            logger.warning("NsysCallback records GPUs, but this machine has no GPU. It records nothing.")
        warn_of_absent_ranks("NsysCallback", self.ranks, trainer)
        if self.nvtx_ranges:
            from megatron.core.utils import configure_nvtx_profiling

            configure_nvtx_profiling(True)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank not in self.ranks or not _has_gpu():
            return
        if self._ranges is None and self.start_step <= trainer.global_step < self.end_step:
            torch.cuda.synchronize()  # keep kernels of earlier steps out of the recording
            torch.cuda.cudart().cudaProfilerStart()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=self.gen_shape)
            self._ranges.__enter__()
            self._recorded = True
        if self._ranges is not None:
            torch.cuda.nvtx.range_push(f"step {trainer.global_step}")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._ranges is None:
            return
        torch.cuda.nvtx.range_pop()
        if trainer.global_step >= self.end_step:
            self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if trainer.global_rank in self.ranks and _has_gpu() and not self._recorded:
            logger.warning(
                "NsysCallback recorded nothing: no step of this start of the run was between start_step=%d and end_step=%d. It "
                "ended after step %d.",
                self.start_step,
                self.end_step,
                trainer.global_step,
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._ranges is None:
            return
        ranges, self._ranges = self._ranges, None
        torch.cuda.synchronize()
        ranges.__exit__(None, None, None)
        torch.cuda.cudart().cudaProfilerStop()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def _has_gpu() -> bool:
    return torch.cuda.is_available()
