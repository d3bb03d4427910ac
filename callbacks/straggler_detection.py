# SPDX-License-Identifier: Apache-2.0
"""Detects GPUs that slow down all others, with NVIDIA's resiliency extension."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from nemo2.base.backend.extras import has, why_missing
from nemo2.base.counts import count_problems, is_number
from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable

logger = logging.getLogger(__name__)


@configurable
class StragglerDetectionCallback(pl.Callback):
    """Detect slow GPUs: nvidia-resiliency-ext times the kernels of training steps and compares GPUs.

    This callback holds the settings, and that package's callback of the same name is the detector. A recipe can
    therefore be written on a machine without the package. The detector needs GPUs: without one the callback reports
    this once, and the run continues.

    Args:
        report_time_interval: Seconds between two comparisons.
        calc_relative_gpu_perf: Compare GPUs with each other.
        calc_individual_gpu_perf: Compare each GPU with its own best speed.
        num_gpu_perf_scores_to_print: The number of best and worst GPUs in each report. 0: stragglers only.
        gpu_relative_perf_threshold: The fraction of the other GPUs' speed below which a GPU is a straggler.
        gpu_individual_perf_threshold: The fraction of its own best speed below which a GPU is a straggler.
        stop_if_detected: Save and end the run with exit code 1 when a straggler is detected.
        enable_ptl_logging: Log every GPU's score.
        profiling_interval: The interval between timed steps.

    Raises:
        ConfigError: a setting that can't work. At the start of training on a GPU: the package is not installed.
    """

    def __init__(
        self,
        report_time_interval: float = 300.0,
        calc_relative_gpu_perf: bool = True,
        calc_individual_gpu_perf: bool = True,
        num_gpu_perf_scores_to_print: int = 5,
        gpu_relative_perf_threshold: float = 0.7,
        gpu_individual_perf_threshold: float = 0.7,
        stop_if_detected: bool = True,
        enable_ptl_logging: bool = True,
        profiling_interval: int = 1,
    ) -> None:
        self.settings = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        problems = [
            f"StragglerDetectionCallback.{name}={self.settings[name]!r}: must be a number above 0 and at most 1."
            for name in ("gpu_relative_perf_threshold", "gpu_individual_perf_threshold")
            if not (is_number(self.settings[name]) and 0 < self.settings[name] <= 1)
        ]
        if not (is_number(report_time_interval) and report_time_interval > 0):  # NaN too
            problems.append(
                f"StragglerDetectionCallback.report_time_interval={report_time_interval!r}: must be a positive number."
            )
        problems += count_problems(
            "StragglerDetectionCallback", least=0, num_gpu_perf_scores_to_print=num_gpu_perf_scores_to_print
        )
        problems += count_problems("StragglerDetectionCallback", profiling_interval=profiling_interval)
        if not calc_relative_gpu_perf and not calc_individual_gpu_perf:
            problems.append(
                "StragglerDetectionCallback compares nothing. Leave calc_relative_gpu_perf or "
                "calc_individual_gpu_perf on."
            )
        if problems:
            raise ConfigError("\n".join(problems))
        self._detector: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._detector is None:
            self._detector = self._make_detector()
        if self._detector is not None:
            self._detector.setup(trainer, pl_module, stage)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._detector is not None:
            self._detector.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._detector is not None:
            self._detector.teardown(trainer, pl_module, stage)
            self._detector = None

    def _make_detector(self) -> Any:
        if not torch.cuda.is_available():
            logger.warning(
                "StragglerDetectionCallback compares GPUs, but this machine has no GPU. It compares nothing."
            )
            return None
        if not has("nvidia_resiliency_ext"):
            raise ConfigError(
                f"trainer.callbacks has a StragglerDetectionCallback: {why_missing('nvidia_resiliency_ext')}. Install "
                "the package, or remove the callback."
            )
        from nvidia_resiliency_ext.ptl_resiliency import (  # pyright: ignore[reportMissingImports]
            StragglerDetectionCallback as Detector,
        )

        return Detector(**self.settings)
