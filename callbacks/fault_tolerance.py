# SPDX-License-Identifier: Apache-2.0
"""Heartbeats for NVIDIA's nvidia-resiliency-ext, whose launcher starts ranks again that give none."""

import logging
import os
from typing import Any

import lightning.pytorch as pl

from nemo2.config.capture import configurable

logger = logging.getLogger(__name__)
_SOCKET_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
"""Set for each rank by the package's launcher."""


@configurable
class FaultToleranceCallback(pl.Callback):
    """Tells the process that watches this rank that it is alive: after each step, validation batch and save.

    Hooks: setup and teardown of fit, training and validation batch end, checkpoint saving. Each is a message over a local
    socket. Without the launcher of nvidia-resiliency-ext there is nobody to tell: that is said once, and the run goes on.
    `nemo2.plugins.FaultTolerancePlugin` sets both up.
    """

    def __init__(self) -> None:
        self._monitor: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._monitor is not None:
            return
        if _SOCKET_VARIABLE not in os.environ:
            if trainer.is_global_zero:
                logger.warning(
                    "FaultToleranceCallback: this run was not started by nvidia-resiliency-ext's launcher, so nobody watches its "
                    "heartbeats; use nemo2.plugins.FaultTolerancePlugin."
                )
            return
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # pyright: ignore[reportMissingImports]

        self._monitor = RankMonitorClient()
        self._monitor.init_workload_monitoring()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._monitor is not None:
            self._monitor.shutdown_workload_monitoring()
            self._monitor = None

    def _beat(self) -> None:
        if self._monitor is not None:
            self._monitor.send_heartbeat()
