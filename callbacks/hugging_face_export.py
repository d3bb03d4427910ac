# SPDX-License-Identifier: Apache-2.0
"""Exports a run's checkpoints to Hugging Face's format during training."""

import glob
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.names import check_choice
from nemo2.base.place import OF_A_RANK
from nemo2.checkpoint.directory import temporary_name, trash_name, without_last
from nemo2.checkpoint.lineage import why_writing_is_refused
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from nemo2.config.capture import configurable
from nemo2.config.dtypes import ShortDtype
from nemo2.training.run_dir.directory import create_directory

_log = logging.getLogger(__name__)


@configurable
class HuggingFaceExportCallback(pl.Callback):
    """Export every n-th checkpoint, and the last one, to Hugging Face's format.

    An export contains the same files as `llm.export_ckpt`: safetensors, config.json and the tokenizer. It is written to
    ``hugging_face/<name of the checkpoint>`` beside the run's ``checkpoints``.

    A separate low-priority process on rank 0's host does the work. It reads links to the checkpoint's files, so the
    checkpoint may be renamed or deleted in the meantime. Training waits for the export only at its end. A failed export
    is reported with its reason and doesn't stop the run. While an export runs, the newest save waits for it and
    replaces any save that was waiting. Each step costs one comparison of two numbers. A folder holds the exports of one run:
    an export that would be written among those of another run fails.

    Args:
        every_n_saves: The number of saves between two exports. None: only the last save.
        at_end: Export the last save, whatever its number.
        directory: The folder of the exports. None: ``hugging_face`` beside the folder of the checkpoints.
        keep: The number of this run's exports to keep, newest first. None: all.
        dtype: The dtype of the weights. None: the checkpoint's, which is fp32 under the FSDP strategies.

    Raises:
        ConfigError: a number is below 1, or no save would ever be exported. At the start of training: the run saves no
            checkpoints, or the folder isn't writable.
    """

    written_to = "directory"

    def __init__(
        self,
        every_n_saves: Optional[int] = None,
        at_end: bool = True,
        directory: Optional[str] = None,
        keep: Optional[int] = None,
        dtype: Optional[ShortDtype] = None,
    ) -> None:
        require_counts("HuggingFaceExportCallback", others=(None,), every_n_saves=every_n_saves, keep=keep)
        if every_n_saves is None and not at_end:
            raise ConfigError(
                "HuggingFaceExportCallback would export nothing. Set every_n_saves (for example 1), or leave "
                "at_end=True."
            )
        if dtype is not None:
            check_choice("HuggingFaceExportCallback.dtype", dtype, ShortDtype)
        self.every_n_saves = every_n_saves
        self.at_end = at_end
        self.directory = directory
        self.keep = keep
        self.dtype = dtype
        self.exported: list[Path] = []
        """This run's exports so far, oldest first. Filled on rank 0 only."""
        self._checkpoints: Optional[ModelCheckpoint] = None
        self._saves = 0
        """The run's published saves, those before a resume too."""
        self._counted = 0
        """The saves of ``_checkpoints`` among them."""
        self._running: Optional[_Export] = None
        self._waiting: Optional[_Export] = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(checkpoints := trainer.checkpoint_callback, ModelCheckpoint):
            raise ConfigError(
                "HuggingFaceExportCallback exports the checkpoints of nemo2's ModelCheckpoint, but this run has none. Set "
                "log.ckpt to one."
            )
        self._checkpoints, self._counted = checkpoints, checkpoints.num_published
        resumed = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        saves = Path(checkpoints.dirpath or "checkpoints")
        folder = self._folder(saves)
        if self.directory and trainer.is_global_zero:
            create_directory(
                folder, field="HuggingFaceExportCallback.directory"
            )  # else each export of the run would fail
        if resumed is not None and resumed.parent.absolute() == saves.absolute():  # exported after its state was saved
            self.exported.append(folder / without_last(resumed).name)
        # A run that begins at a checkpoint of another run has none of that run's exports.
        self.exported = [done for done in dict.fromkeys(self.exported) if done.parent == folder and done.is_dir()]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero:
            self._check_for_save()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The last save happens in on_train_end, after all other callbacks.
        if not trainer.is_global_zero or trainer.state.status == "interrupted":
            return
        self._check_for_save(last=True)
        while self._running is not None:
            self._running.process.wait()
            self._advance()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._discard_exports()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._discard_exports()

    @property
    def state_key(self) -> str:
        return self._generate_state_key(directory=self.directory)

    def state_dict(self) -> dict[str, Any]:
        """The saves up to the one that this state is part of, and the exports."""
        unpublished = 0 if self._checkpoints is None else self._checkpoints.num_saves - self._counted
        return {"saves": self._saves + unpublished, "exports": [str(target) for target in self._targets()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saves, self.exported = state_dict["saves"], [Path(target) for target in state_dict["exports"]]

    def _folder(self, saves: Path) -> Path:
        """The folder of the exports of the checkpoints in ``saves``."""
        return Path(self.directory).expanduser() if self.directory else saves.with_name("hugging_face")

    def _check_for_save(self, *, last: bool = False) -> None:
        """Check for new saves since the last call, of which the newest is exported, and for an export that has ended."""
        self._advance()
        # A run that was complete when it began has started no training.
        if self._checkpoints is None or not (path := self._checkpoints.last_model_path):
            return
        before, published = self._saves, self._checkpoints.num_published
        self._saves, self._counted = before + published - self._counted, published
        due = self.every_n_saves is not None and self._saves // self.every_n_saves > before // self.every_n_saves
        name = without_last(Path(path)).name
        if not due and not (last and self.at_end and name not in [target.name for target in self._targets()]):
            return
        if self._waiting is not None:
            _log.info("%s is not exported, because a later checkpoint replaces it.", self._waiting.target.name)
            self._waiting.discard()
        folder = self._folder(Path(path).parent)
        try:
            if why := why_writing_is_refused(folder, folder / name, Path(path)):
                self._warn_of_failure(folder / name, f"{why} Set another directory.")
                return
            self._waiting = _Export.of(Path(path), folder / name, self.dtype)
        except OSError as error:
            self._warn_of_failure(folder / name, f"{error.strerror or error}")
        self._advance()

    def _targets(self) -> list[Path]:
        """The exports that are done, under way, or waiting."""
        under_way = (export.target for export in (self._running, self._waiting) if export is not None)
        return [*self.exported, *under_way]

    def _advance(self) -> None:
        """Report an export that has ended, and start the waiting one."""
        if self._running is not None and self._running.process.poll() is not None:
            self._finish(self._running)
            self._running = None
        if self._running is None and self._waiting is not None:
            self._running, self._waiting = self._waiting, None
            try:
                self._running.start()
            except OSError as error:
                self._warn_of_failure(self._running.target, str(error))
                self._running.discard()
                self._running = None

    def _finish(self, export: "_Export") -> None:
        problem = export.problem()
        export.discard()
        if problem is not None:
            self._warn_of_failure(export.target, problem)
            return
        _log.info("Exported %s.", export.target)
        self.exported = [done for done in self.exported if done != export.target] + [export.target]
        for old in self.exported[: -self.keep] if self.keep is not None else []:
            shutil.rmtree(old, ignore_errors=True)
            self.exported.remove(old)

    def _discard_exports(self) -> None:
        for export in (self._running, self._waiting):
            if export is not None:
                export.discard()
        self._running = self._waiting = None

    @staticmethod
    def _warn_of_failure(target: Path, problem: str) -> None:
        _log.warning("The export %s failed, and training continues: %s", target, problem)


@dataclass
class _Export:
    """The export of one checkpoint, in a separate process."""

    links: Path
    """A folder of links to the checkpoint's files. It is deleted with the export's end."""
    target: Path
    command: list[str]
    output: Any
    _process: Optional[subprocess.Popen] = None

    @classmethod
    def of(cls, checkpoint: Path, target: Path, dtype: Optional[str]) -> "_Export":
        links = trash_name(checkpoint)
        try:
            shutil.copytree(checkpoint, links, copy_function=os.link)
        except OSError:
            shutil.rmtree(links, ignore_errors=True)
            raise
        command = [sys.executable, "-m", "nemo2", "export", str(links), "--output", str(target), "--overwrite"]
        command += ["--dtype", dtype] if dtype is not None else []
        nice = shutil.which("nice")
        return cls(links, target, [nice, "-n", "10", *command] if nice else command, tempfile.TemporaryFile("w+"))

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        self._process = subprocess.Popen(
            self.command,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    @property
    def process(self) -> subprocess.Popen:
        assert self._process is not None
        return self._process

    def problem(self) -> Optional[str]:
        """The reason of a failure. None for a successful export."""
        if self.process.returncode == 0:
            return None
        self.output.seek(0)
        words = " ".join(self.output.read()[-2000:].replace(str(self.links), "the checkpoint").split())
        return words or f"exit code {self.process.returncode}"

    def discard(self) -> None:
        """End the process if it still runs, and delete the links and the partial output of a killed process."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        killed = temporary_name(Path(glob.escape(self.target.name)), "*").name
        for left in (self.links, *self.target.parent.glob(killed)):
            shutil.rmtree(left, ignore_errors=True)
        self.output.close()
