# SPDX-License-Identifier: Apache-2.0
"""`NeMoLogger`: creates a run's directory and everything that is written into it."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from nemo2.base.errors import ConfigError
from nemo2.checkpoint.leftovers import publish_written
from nemo2.checkpoint.model_checkpoint import default_filename
from nemo2.config.capture import configurable
from nemo2.training.run_dir.callback import RunDirectoryCallback
from nemo2.training.run_dir.directory import (
    RUN_DIR_FILE_VARIABLE,
    RunDirectory,
    agree,
    choose_directory,
    create_directory,
    delete_leftovers,
    meeting_of,
    problems_of_copies,
    refuse_another_run,
    writing_to,
)
from nemo2.training.run_dir.environment import write_environment
from nemo2.training.run_dir.log_files import add_log_file, warn_on_console
from nemo2.training.run_dir.metrics import JSONLLogger
from nemo2.training.run_dir.records import RECIPE_FILE, RECIPE_VARIABLE, write_text

logger = logging.getLogger(__name__)


@configurable
@dataclass(eq=False)
class NeMoLogger:
    """Set up the directory, logs, metrics and checkpoint callback of a run.

    ``<log_dir>/<name>/<version>/`` receives:

    - ``metrics.jsonl``, ``report.html`` and TensorBoard logs in ``tb_logs/``
    - ``recipe.json``, ``environment.json`` and ``effective_config.yaml``
    - one ``nemo_log_globalrank-<g>_localrank-<l>.txt`` per rank
    - ``checkpoints/``

    See `nemo2.training.run_dir.directory.choose_directory` for the choice of the version.
    """

    name: str = "default"
    """The run's name, a folder below ``log_dir``."""
    log_dir: Optional[str] = None
    """The folder of all runs. None: ``./nemo_experiments``."""
    explicit_log_dir: Optional[str] = None
    """The run directory itself, in place of ``log_dir``, ``name`` and ``version``."""
    version: Optional[str] = None
    """The folder below ``name``. None: the start time."""
    use_datetime_version: bool = True
    """Use the start time as the version. False, without a ``version``: the run has no version folder."""
    log_local_rank_0_only: bool = False
    """Only the first rank of each node writes a log file."""
    log_global_rank_0_only: bool = False
    """Only rank 0 writes a log file."""
    files_to_copy: Optional[list[str]] = None
    """Files that rank 0 copies into the run directory."""
    update_logger_directory: bool = True
    """Redirect TensorBoard and W&B loggers into the run directory."""
    ckpt: Optional[Checkpoint] = None
    """The checkpoint callback. It replaces the trainer's own. A ``dirpath`` of None becomes ``<run
    directory>/checkpoints``."""
    tensorboard: Optional[TensorBoardLogger] = None
    """A TensorBoard logger, which records the logged metrics under NeMo's tags."""
    wandb: Optional[Logger] = None
    """A Weights & Biases logger."""
    extra_loggers: Optional[list[Logger]] = None
    """Further Lightning loggers. None: no others."""

    def setup(
        self,
        trainer: Any,
        resume_if_exists: bool = False,
        task_config: Any = None,
        checkpoint_in: Optional[Callable[[Path], Optional[Path]]] = None,
    ) -> RunDirectory:
        """Create the run directory and connect ``trainer`` to it. Every rank must call it.

        Args:
            trainer: a Lightning Trainer that has not started yet.
            resume_if_exists: continue the newest run of this name that has a finished checkpoint.
            task_config: the recipe, written to ``recipe.json``. None: the recipe that the launcher passed, if any.
            checkpoint_in: a function that returns the checkpoint from which the run starts, or None, given the
                directory of its checkpoints. None: unknown, so a directory of another run is refused only at the start
                of training.

        Returns:
            The run directory, with the fields ``log_dir``, ``exp_dir``, ``name`` and ``version`` of NeMo's
            ``AppState``.

        Raises:
            ConfigError: the directory is not writable, or a file of ``files_to_copy`` does not exist or would
                replace another.
            CheckpointError: the directory holds checkpoints or metrics of another run.

        Errors are raised before the trainer and the directory are changed.
        """
        files = [Path(file).expanduser() for file in self.files_to_copy or []]
        if problems := problems_of_copies(files):
            raise ConfigError("\n".join(problems))
        if self.explicit_log_dir and (self.log_dir or self.version):
            logger.warning("log.explicit_log_dir is set, so log.log_dir, log.name and log.version have no effect.")
        directory = choose_directory(
            name=self.name,
            log_dir=self.log_dir,
            explicit_log_dir=self.explicit_log_dir,
            version=self.version,
            use_datetime_version=self.use_datetime_version,
            resume_if_exists=resume_if_exists,
            meeting=meeting_of(trainer),
        )
        if checkpoint_in is not None:
            checkpoints = Path(getattr(self.ckpt, "dirpath", None) or directory.checkpoints)
            if resume_if_exists:
                if trainer.is_global_zero:
                    publish_written(checkpoints)
                agree("", meeting_of(trainer))  # no rank searches before
            refuse_another_run(
                directory.log_dir, checkpoints, checkpoint_in(checkpoints), resume_if_exists=resume_if_exists
            )
        create_directory(directory.log_dir, field="log.explicit_log_dir" if self.explicit_log_dir else "log.log_dir")
        with writing_to(directory.log_dir):
            if trainer.is_global_zero:
                self._write_files(directory, trainer=trainer, files=files, task_config=task_config)
            everywhere = trainer.local_rank == 0 or not self.log_local_rank_0_only
            if everywhere and (trainer.is_global_zero or not self.log_global_rank_0_only):
                name = f"nemo_log_globalrank-{trainer.global_rank}_localrank-{trainer.local_rank}.txt"
                add_log_file(directory.log_dir / name)
        if trainer.is_global_zero:
            warn_on_console()
        metrics = self._install_loggers(directory, trainer)
        self._install_checkpoint(directory, trainer)
        others = [item for item in trainer.callbacks if not isinstance(item, RunDirectoryCallback)]
        first = RunDirectoryCallback(directory, metrics, resume_if_exists=resume_if_exists)
        trainer.callbacks[:] = [first, *others]
        logger.info("run directory: %s", directory.log_dir)
        return directory

    def _write_files(self, directory: RunDirectory, *, trainer: Any, files: list[Path], task_config: Any) -> None:
        write_environment(directory.log_dir, world_size=trainer.world_size)
        for path in delete_leftovers(directory):
            logger.info("Deleted %s, which an interrupted save had left.", path)
        recipe = recipe_text(task_config)
        if recipe is not None:
            write_text(directory.log_dir / RECIPE_FILE, recipe)
        for file in files:
            shutil.copy2(file, directory.log_dir / file.name)
        if target := os.environ.get(RUN_DIR_FILE_VARIABLE):
            write_text(target, str(directory.log_dir))

    def _install_loggers(self, directory: RunDirectory, trainer: Any) -> JSONLLogger:
        requested = [item for item in (self.tensorboard, self.wandb, *(self.extra_loggers or ())) if item is not None]
        existing = [
            item
            for item in trainer.loggers
            if not isinstance(item, JSONLLogger)
            and not (self.tensorboard is not None and isinstance(item, TensorBoardLogger))
        ]
        if existing or requested:
            from nemo2.training.run_dir.trackers import keep_running, name_run
        for item in (*existing, *requested):
            name_run(item, directory)
            keep_running(item)
            if self.update_logger_directory:
                move_logger(item, directory)
        metrics = JSONLLogger(
            str(directory.log_dir), name=directory.name or directory.log_dir.name, version=directory.version or ""
        )
        # Assigned directly, because `configure_logger` advertises a service on every call. Ours comes last, because
        # Lightning takes `trainer.log_dir` from the first logger.
        trainer.loggers = [*existing, *(item for item in requested if item not in existing), metrics]
        return metrics

    def _install_checkpoint(self, directory: RunDirectory, trainer: Any) -> None:
        if self.ckpt is not None:
            others = [item for item in trainer.callbacks if not isinstance(item, Checkpoint)]
            if len(others) != len(trainer.callbacks) and self.ckpt not in trainer.callbacks:
                logger.warning("log.ckpt replaces the checkpoint callback that the trainer had.")
            # Last, where Lightning keeps checkpoint callbacks, so that saves include the other callbacks' results.
            trainer.callbacks[:] = [*others, self.ckpt]
        # Both our callback and Lightning's have the base class `Checkpoint`, which defines no directory.
        checkpoints: list[Any] = [item for item in trainer.callbacks if isinstance(item, Checkpoint)]
        for callback in checkpoints:
            if getattr(callback, "dirpath", "") is None:
                callback.dirpath = str(directory.checkpoints)
            if getattr(callback, "filename", "") is None:
                callback.filename = default_filename(getattr(callback, "monitor", None), directory.name or "model")


def move_logger(item: Logger, directory: RunDirectory) -> None:
    """Redirect a TensorBoard or W&B logger into the run directory. Other loggers are left unchanged."""
    if isinstance(item, TensorBoardLogger):
        item._root_dir, item._name, item._version = str(directory.log_dir / "tb_logs"), "", ""
    elif type(item).__name__ == "WandbLogger":  # by name, because wandb is an extra
        item._save_dir = str(directory.log_dir)  # pyright: ignore[reportAttributeAccessIssue]
        item._wandb_init["dir"] = str(directory.log_dir)  # pyright: ignore[reportAttributeAccessIssue]


def recipe_text(task_config: Any) -> Optional[str]:
    """``task_config`` as JSON. Without it, the recipe that the launcher passed. None: neither exists."""
    from nemo2.config.serialize import to_json

    if task_config is not None:
        return to_json(task_config)
    if file := os.environ.get(RECIPE_VARIABLE):
        return Path(file).read_text(encoding="utf-8")
    # On a rank that nemo-run started directly, which gets the serialized task as a file.
    files = [argument for argument in sys.argv[1:] if argument.endswith("_fn_or_script") and os.path.isfile(argument)]
    if len(files) != 1 or "nemo_run" not in sys.modules:
        return None
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    return to_json(ZlibJSONSerializer().deserialize(Path(files[0]).read_text(encoding="utf-8")))
