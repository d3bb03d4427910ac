# SPDX-License-Identifier: Apache-2.0
"""Callbacks as configs, to append to a recipe's ``trainer.callbacks``."""

from nemo2.config import Config


def straggler_det_callback(
    straggler_report_time_interval: int = 300,
    stop_if_detected_straggler: bool = True,
    gpu_relative_perf_threshold: float = 0.7,
    gpu_individual_perf_threshold: float = 0.7,
) -> Config:
    """Detect slow GPUs every ``straggler_report_time_interval`` seconds. Needs nvidia-resiliency-ext on the GPU
    machine.

    The thresholds are fractions of the other GPUs' speed, and of a GPU's own best speed.
    """
    from nemo2.callbacks import StragglerDetectionCallback

    return Config(
        StragglerDetectionCallback,
        report_time_interval=straggler_report_time_interval,
        stop_if_detected=stop_if_detected_straggler,
        gpu_relative_perf_threshold=gpu_relative_perf_threshold,
        gpu_individual_perf_threshold=gpu_individual_perf_threshold,
    )
