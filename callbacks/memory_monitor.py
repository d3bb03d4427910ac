# SPDX-License-Identifier: Apache-2.0
"""Logs memory in use beside the loss."""

from typing import Any, Optional

import lightning.pytorch as pl
import torch

from nemo2.base import ranks
from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable

GIB = 2**30
_NAMES = {
    "allocated_bytes": "memory/allocated_gib",
    "peak_bytes": "memory/peak_gib",
    "reserved_peak_bytes": "memory/reserved_peak_gib",
}


@configurable
class MemoryMonitor(pl.Callback):
    """Log memory on the steps that log, in GiB, as the largest value of all ranks.

    - ``memory/allocated_gib``: memory in use when the step ends. On a GPU the memory of tensors, on a CPU that of the
      whole process.
    - ``memory/peak_gib``: the peak since the last logged step. On a CPU, since the process started.
    - ``memory/reserved_peak_gib``: the peak that torch's allocator reserved on the GPU, including fragmentation.

    Args:
        memory_keys: Statistics of ``torch.cuda.memory_stats`` to log instead, each with the name that it is logged
            under, as ``memory/<name>``, in torch's units. None: the three values above. CPUs have no such statistics,
            so the three values are logged there.
        dist_aggregate_batch_interval: Accepted for NeMo's signature. Must be None, because each value covers all ranks
            already.

    Raises:
        ConfigError: ``dist_aggregate_batch_interval`` is set, or torch has no statistic of a name.
    """

    def __init__(
        self, memory_keys: Optional[dict[str, str]] = None, dist_aggregate_batch_interval: Optional[int] = None
    ) -> None:
        if dist_aggregate_batch_interval is not None:
            raise ConfigError(
                f"MemoryMonitor.dist_aggregate_batch_interval={dist_aggregate_batch_interval}: remove this argument. "
                "Every logged value is already the maximum over all ranks, at each trainer.log_every_n_steps."
            )
        self.memory_keys = memory_keys
        self.dist_aggregate_batch_interval = dist_aggregate_batch_interval

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.memory_keys or get_backend().name != "cuda":
            return
        known = torch.cuda.memory_stats()
        for key in self.memory_keys:
            if key not in known:
                raise ConfigError(
                    f"MemoryMonitor.memory_keys: torch has no memory statistic {key!r}{did_you_mean(key, list(known))}"
                )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if not trainer._logger_connector.should_update_logs:
            return
        figures = self._figures()
        values = torch.tensor(list(figures.values()), dtype=torch.float32, device=get_backend().device)
        for name, value in zip(figures, ranks.largest(values).tolist(), strict=True):  # over all ranks
            pl_module.log(name, value, batch_size=1)
        get_backend().reset_peak_memory()

    def _figures(self) -> dict[str, float]:
        if self.memory_keys and get_backend().name == "cuda":
            statistics = torch.cuda.memory_stats()
            return {f"memory/{name}": float(statistics[key]) for key, name in self.memory_keys.items()}
        measured = get_backend().memory_figures()
        return {name: measured[key] / GIB for key, name in _NAMES.items() if key in measured}
