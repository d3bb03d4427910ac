# SPDX-License-Identifier: Apache-2.0
"""Writes ``metrics.jsonl``: a run's metrics, one JSON object per line, readable while the run writes it.

Each logged training step and each validation writes a line. ``step`` counts from zero, as in the progress line: the
line of step ``s`` follows the optimizer step that made ``s + 1`` finished steps. Names are those of the progress line
and of TensorBoard, without units (``train_step_timing in s`` becomes ``train_step_timing``, in seconds).

JSON has no NaN. A value that is not finite is written as ``null``, with its kind under ``nonfinite``
(``{"reduced_train_loss": null, "nonfinite": {"reduced_train_loss": "nan"}}``). `read_metrics` restores it.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from nemo2.base.errors import RuntimeFault
from nemo2.base.files import open_to_write
from nemo2.checkpoint.writer_process import persistently
from nemo2.training.run_dir.records import METRICS_FILE, note_resumption, read_metrics, to_line, truncate_metrics

__all__ = ["METRICS_FILE", "JSONLLogger", "read_metrics", "truncate_metrics"]

logger = logging.getLogger(__name__)

_WHOLE_NUMBERS = frozenset({"step", "consumed_samples", "global_batch_size", "epoch"})
_NOT_WRITTEN = frozenset({"v_num", "step"})


class JSONLLogger(Logger):
    """Append to ``<save_dir>/metrics.jsonl`` on rank 0, one flushed line per call.

    Lightning calls `log_metrics` on logging steps only (``Trainer(log_every_n_steps=...)``), so other steps cost
    nothing.

    Args:
        save_dir: The folder of ``metrics.jsonl``.
        name: The experiment's name, for Lightning.
        version: The run's version, for Lightning.
    """

    def __init__(self, save_dir: str, *, name: str = "", version: str = "") -> None:
        super().__init__()
        self._save_dir = Path(save_dir)
        self._name = name
        self._version = version
        self._file = None
        self.counters: Callable[[], Mapping[str, int]] = dict
        """Returns the exact values of counters at the time of the call. Lightning stores logged values in float32,
        in which a count of samples is off by one from 16.8 million on."""

    @property
    def path(self) -> Path:
        return self._save_dir / METRICS_FILE

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._version

    @property
    def save_dir(self) -> str:
        return str(self._save_dir)

    @property
    def log_dir(self) -> str:
        return str(self._save_dir)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because ``recipe.json`` and ``effective_config.yaml`` hold the settings."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: Optional[int] = None) -> None:
        record = to_record(metrics, step=step)
        record |= {name: value for name, value in self.counters().items() if name in record}
        if self._file is not None and not self._is_there():
            logger.warning("%s was removed during the run. A new file starts with %s.", self.path, record)
            self._file.close()
            self._file = None
        if self._file is None:
            self._save_dir.mkdir(parents=True, exist_ok=True)
            # Line-buffered: each line reaches the file whole, so a reader never sees half a line for long.
            self._file = open(self.path, "a", buffering=1, encoding="utf-8", opener=open_to_write)  # noqa: SIM115
        try:
            assert self._file is not None
            try:
                self._file.write(to_line(record))
            except OSError:
                persistently(self._file.flush)  # unwritten data is still in its buffer
        except OSError as error:
            raise RuntimeFault(
                f"{self.path} can't be written ({error.strerror or error}). The run ends, because its metrics would be "
                "lost. Free disk space or repair the file system, then run the same command again to resume from the "
                "last checkpoint."
            ) from error

    def _is_there(self) -> bool:
        """Whether the open file still has its name. A folder that is unreachable now may become reachable again."""
        assert self._file is not None
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    @rank_zero_only
    def resume_at(self, finished_steps: int) -> None:
        """Drop the lines of steps that the run will repeat, so that curves never go backwards, and record the
        resumption."""
        self._close()
        note_resumption(self._save_dir, finished_steps=finished_steps)
        truncate_metrics(self.path, finished_steps=finished_steps)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "counters": dict}


def to_record(metrics: Mapping[str, float], *, step: Optional[float]) -> dict[str, Any]:
    """The record of one call of a logger.

    ``global_step``, if it was logged, is the step's number. It replaces ``step``, which may be in another unit.
    """
    metrics = dict(metrics)
    step = metrics.pop("global_step", step)
    record: dict[str, Any] = {} if step is None else {"step": int(step)}
    for name, value in metrics.items():
        if name not in _NOT_WRITTEN:
            name, value = name.removesuffix(" in s"), float(value)
            record[name] = int(value) if name in _WHOLE_NUMBERS and value.is_integer() else value
    return record
