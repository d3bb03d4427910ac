# SPDX-License-Identifier: Apache-2.0
"""Writes the parts of a run directory that are known only during the run."""

import logging
from pathlib import Path
from typing import Any, Optional

import yaml
from lightning.pytorch.callbacks import Callback

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError, Nemo2Error, Preempted, RuntimeFault
from nemo2.checkpoint.directory import read_manifest
from nemo2.training.run_dir.directory import RunDirectory, refuse_another_run, writing_to
from nemo2.training.run_dir.faults import record_fault
from nemo2.training.run_dir.log_files import remove_log_file
from nemo2.training.run_dir.metrics import JSONLLogger, read_metrics
from nemo2.training.run_dir.records import EFFECTIVE_FILE, ENVIRONMENT_FILE, RECIPE_FILE, write_text

logger = logging.getLogger(__name__)


class RunDirectoryCallback(Callback):
    """Truncate ``metrics.jsonl`` on resume, and write ``effective_config.yaml`` at the first step and the report at the end
    or after a failure.

    Hooks: ``on_train_start``, ``on_train_batch_start`` (acts on the first), ``on_train_end`` (logs the last step),
    ``on_fit_end``, ``on_exception``, ``teardown``. Each step costs one comparison. Rank 0 writes the files, and every rank
    logs a failure.
    """

    def __init__(self, directory: RunDirectory, metrics: JSONLLogger, *, resume_if_exists: bool = False) -> None:
        super().__init__()
        self.directory = directory
        self.metrics = metrics
        self.resume_if_exists = resume_if_exists
        self._described = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that all ranks write to the same directory, now that they can communicate.

        Raises:
            RuntimeFault: the ranks chose different directories.
        """
        chosen = ranks.gather(str(self.directory.log_dir))
        other = next((rank for rank, directory in enumerate(chosen) if directory != chosen[0]), None)
        if other is not None:
            raise RuntimeFault(
                f"Rank 0 would write to {chosen[0]}, but rank {other} to {chosen[other]}, so every checkpoint would be "
                "incomplete. Set log.version or log.explicit_log_dir to the same value on all ranks."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """
        Raises:
            CheckpointError: on every rank, if the directory holds results of another run.
        """
        if trainer.ckpt_path or trainer.global_step == 0:  # else a second fit continues this run
            problem = trainer.strategy.broadcast(self._another_run(trainer) if trainer.is_global_zero else None)
            if problem is not None:
                raise CheckpointError(problem)
        with writing_to(self.directory.log_dir):
            self.metrics.resume_at(trainer.global_step)
        if isinstance(getattr(trainer.strategy, "consumed_samples", None), int):
            self.metrics.counters = lambda: {"consumed_samples": trainer.strategy.consumed_samples}
        if trainer.is_global_zero and trainer.ckpt_path:
            self._complete_metrics(trainer)
        self._described = False

    def _another_run(self, trainer: Any) -> Optional[str]:
        checkpoints = Path(getattr(trainer.checkpoint_callback, "dirpath", None) or self.directory.checkpoints)
        checkpoint = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        try:
            refuse_another_run(self.directory.log_dir, checkpoints, checkpoint, resume_if_exists=self.resume_if_exists)
        except CheckpointError as error:
            return str(error)
        return None

    def _complete_metrics(self, trainer: Any) -> None:
        """Add the metrics of a step that a killed run saved but didn't log, from the checkpoint's manifest. A step
        is saved before its line is written."""
        checkpoint, finished_steps = Path(trainer.ckpt_path), trainer.global_step
        manifest = read_manifest(checkpoint)
        logs = finished_steps % max(1, trainer.log_every_n_steps) == 0
        if manifest is None or manifest.step != finished_steps or not logs:
            return
        has_lines = self.metrics.path.is_file()
        if not has_lines and checkpoint.absolute().parent != self.directory.checkpoints:
            return
        values = {name: value for name, value in manifest.metrics.items() if not name.startswith("val_")}
        records = read_metrics(self.metrics.path) if has_lines else []
        last_line = max((record.get("step", -1) for record in records), default=-1)
        if values.get("global_step") == finished_steps - 1 and last_line < finished_steps - 1:
            self.metrics.log_metrics(values | {"consumed_samples": float(manifest.consumed_samples)})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        # Not in on_train_start, where later callbacks may still adjust settings.
        if not self._described:
            self._described = True
            if trainer.is_global_zero:
                from nemo2.training.run_dir.effective import effective_config
                from nemo2.training.run_dir.trackers import describe_run

                settings, directory = effective_config(trainer, pl_module), self.directory.log_dir
                with writing_to(directory):
                    write_text(directory / EFFECTIVE_FILE, yaml.safe_dump(settings, sort_keys=False, width=120))
                files = (EFFECTIVE_FILE, RECIPE_FILE, ENVIRONMENT_FILE)
                describe_run(trainer.loggers, settings, [directory / name for name in files])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        # Before other callbacks save and report the last step.
        log_last_step = getattr(trainer.strategy, "log_last_step", None)
        if log_last_step is not None:
            log_last_step()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._report(trainer)  # with the last checkpoint, which is saved in on_train_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        record_fault(exception, step=trainer.global_step)
        if not isinstance(exception, Preempted):  # which says what it saved
            logger.error("the run ended with %s", type(exception).__name__, exc_info=exception)
        self._report(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        remove_log_file()

    def _report(self, trainer: Any) -> None:
        if not trainer.is_global_zero:
            return
        if not self.metrics.path.is_file():
            logger.info("no report was written, because the run has logged no step")
            return
        # The other ranks draw no pictures.
        from nemo2.training.run_dir.report import write_report
        from nemo2.training.run_dir.trackers import attach

        try:
            path = write_report(self.directory.log_dir)
        except Nemo2Error as error:
            logger.error("the report was not written: %s", error)
        except Exception:  # a failed picture must not make a trained model a failed run
            directory = self.directory.log_dir
            logger.exception("the report was not written. Run `nemo2 runs report %s` to try again", directory)
        else:
            logger.info("report: %s", path)
            attach(trainer.loggers, [path])
