# SPDX-License-Identifier: Apache-2.0
"""Sends heartbeats to NVIDIA's nvidia-resiliency-ext, whose launcher restarts ranks that stop sending them."""

import logging
import os
from typing import Any

import lightning.pytorch as pl

from nemo2.config.capture import configurable

logger = logging.getLogger(__name__)
_SOCKET_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
"""The variable that the package's launcher sets for each rank."""


@configurable
class FaultToleranceCallback(pl.Callback):
    """Send a heartbeat to the process that monitors this rank, after each step, validation batch and save.

    Hooks: setup and teardown of fit, end of each training and validation batch, checkpoint saving. Each heartbeat is a
    message over a local socket. Without the launcher of nvidia-resiliency-ext no process receives heartbeats: the
    callback reports this once, and the run continues. `nemo2.plugins.FaultTolerancePlugin` configures both the callback
    and the launcher.
    """

    def __init__(self) -> None:
        self._monitor: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._monitor is not None:
            return
        if _SOCKET_VARIABLE not in os.environ:
            if trainer.is_global_zero:
                logger.warning(
                    "FaultToleranceCallback: the launcher of nvidia-resiliency-ext did not start this run, so no "
                    "process watches the heartbeats. Start the run with nemo2.plugins.FaultTolerancePlugin."
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
