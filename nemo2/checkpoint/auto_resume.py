# SPDX-License-Identifier: Apache-2.0
"""Chooses the checkpoint of a run: its newest finished checkpoint, a named checkpoint, or weights to start from."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]

from nemo2.base.advice import advice, new_name
from nemo2.base.errors import CheckpointError, RunFinished
from nemo2.checkpoint.directory import CONTEXT_PATH, Manifest, finished, read_manifest, unusable
from nemo2.checkpoint.leftovers import publish_written
from nemo2.checkpoint.lineage import belongs, own, run_of
from nemo2.checkpoint.paths import HUGGING_FACE, checkpoint_at, checkpoint_folders
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable

_log = logging.getLogger(__name__)
_ADAPTER = "a checkpoint of adapters names its base weights: set {} to the checkpoint alone."
register_gone("nemo2.checkpoint.auto_resume:RestoreConfig", adapter_path=_ADAPTER.format("path"))
register_gone("nemo2.checkpoint.auto_resume:AutoResume", adapter_path=_ADAPTER.format("resume_from_path"))


@configurable
@dataclass(kw_only=True)
class RestoreConfig:
    """Start a new run from the weights of another run or of a released model."""

    path: str
    """The weights, as one of:

    - a checkpoint directory, or a run's directory, of which the newest checkpoint is taken
    - ``nemo://name``: a model that `llm.import_ckpt` has stored
    - ``hf:///folder``: released weights in a folder with config.json and safetensors files
    - ``hf://organisation/name``: released weights from Hugging Face's hub

    Released weights need no conversion first. Each rank reads only the parameters that its layout holds.
    """
    load_model_state: bool = True
    """Load the parameters."""
    load_optim_state: bool = False
    """Load the optimizer's state too."""
    load_artifacts: bool = True
    """Use the checkpoint's tokenizer for the model, and for the data if both share one tokenizer."""

    def __post_init__(self) -> None:
        self.path = str(self.path)  # scripts name it as a Path too

    @property
    def checkpoint(self) -> Optional[Path]:
        """The checkpoint at ``path`` (`checkpoint_at`). None: ``path`` names released weights."""
        return None if self.path.startswith(HUGGING_FACE) else checkpoint_at(self.path)


def starts_from_weights(resume: Any, strategy: Any) -> bool:
    """Whether a run with these parts, or their nodes in a recipe, names weights to start from."""
    owners = ((resume, "restore_config"), (resume, "resume_from_path"), (strategy, "restore_config"))
    return any(getattr(owner, name, None) for owner, name in owners)


@dataclass
class Search:
    """The folders that were searched for a checkpoint and the result, for messages."""

    looked_at: list[Path] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)
    """Folders that look like a checkpoint but are unusable, with the reason."""
    newest: Optional[Path] = None
    manifest: Optional[Manifest] = None
    """The manifest of ``newest``."""
    whole: Optional[Path] = None
    """The newest checkpoint with an optimizer's state, from which training can resume."""
    whole_step: int = -1
    begun: bool = False
    """The run was started here before, whether or not it has saved anything."""


@configurable
@dataclass(kw_only=True)
class AutoResume:
    """Find the checkpoint or the weights that a run starts from.

    The first of these that applies:

    1. with ``resume_if_exists``, the newest checkpoint in the run's own directory, if the run began at a checkpoint of 2, or of 3
      in another directory, and has gone on since
    2. ``resume_from_path``
    3. with ``resume_if_exists``, the finished checkpoint of the highest step: of any run in ``resume_from_directory``
      if that is set, else of this run in its own directory, since it last went back to one of them by 2
    4. ``restore_config``
    """

    restore_config: Optional[RestoreConfig] = None
    """The weights that the run starts from if it doesn't resume. None: its own initial weights."""
    resume_from_directory: Optional[str] = None
    """Search this directory instead of the run's own."""
    resume_from_path: Optional[str] = None
    """Resume exactly this checkpoint, or the newest one of this run's directory."""
    resume_if_exists: bool = False
    """Resume from the finished checkpoint of the highest step."""
    resume_past_end: bool = False
    """Resume even from a checkpoint at or beyond ``trainer.max_steps``."""
    resume_ignore_no_checkpoint: bool = False
    """Start from the beginning if ``resume_if_exists`` finds no checkpoint. False: that is an error, unless
    ``restore_config`` is set."""
    accept_changes: bool = False
    """Resume even if the recipe has changed in a way that doesn't fit the checkpoint, such as another vocabulary."""

    def setup(
        self,
        trainer: pl.Trainer,
        model: Optional[pl.LightningModule] = None,
        *,
        training: bool = True,
        directory: Optional[Path] = None,
        data: Optional[pl.LightningDataModule] = None,
    ) -> Optional[Path]:
        """Point ``trainer`` at the checkpoint to resume from. Returns its path, or None for a run that starts from the
        beginning.

        Args:
            trainer: The trainer. Its checkpoint callback holds the directory of the run's checkpoints.
            model: Receives the tokenizer of the weights to start from, see ``restore_config.load_artifacts``. None: no
                tokenizer is loaded.
            training: False for validation, which may also read the last checkpoint of a finished run.
            directory: The directory of the run's checkpoints if no callback saves any. None: there is none.
            data: Receives the tokenizer too if the model and the data share one.

        Raises:
            CheckpointError: there is nothing to resume from, the named directory is no checkpoint, or the tokenizer's
                files differ from those that were saved.
            SecurityError: the description of the tokenizer names a class outside the allow-list.
        """
        if self.restore_config is not None:  # set on resume too: the frozen part of the model comes from it
            trainer.strategy.restore_config = self.restore_config  # pyright: ignore[reportAttributeAccessIssue]
        path = self.get_trainer_ckpt_path(trainer, training=training, directory=directory)
        if path is not None:
            trainer.ckpt_path = path
            if (
                self.resume_from_path
                and trainer.checkpoint_callback is not None
                and path == checkpoint_at(self.resume_from_path)
            ):
                trainer.checkpoint_callback.requested = path  # pyright: ignore[reportAttributeAccessIssue]
        if self.restore_config is not None and self.restore_config.load_artifacts and model is not None:
            from nemo2.checkpoint.tokenizers import take_tokenizer

            take_tokenizer(self.restore_config.path, model, data, resumed_from=path)
        return path

    def get_trainer_ckpt_path(
        self, trainer: pl.Trainer, *, training: bool = True, directory: Optional[Path] = None
    ) -> Optional[Path]:
        """The checkpoint to resume from, or None to start from the beginning. The arguments and errors are those of
        `setup`."""
        named = checkpoint_at(self.resume_from_path) if self.resume_from_path else None
        if named is not None and not named.is_dir():
            raise CheckpointError(
                f"resume.resume_from_path={self.resume_from_path}: this checkpoint directory does not exist. Set "
                "the path of an existing checkpoint."
            )
        search = self._resumable(trainer, directory) if self.resume_if_exists else Search()
        if named is not None and not _continues(search, named):
            if training:
                refuse_weights_only(named)
            return named
        if not self.resume_if_exists:
            return None
        looked = ", ".join(str(path) for path in search.looked_at) or "no directory: the run saves no checkpoints"
        if search.left_out:
            rank_zero_info(f"Skipped: {_list(search.left_out)}.")
        if search.newest is None:
            if search.left_out:
                raise CheckpointError(
                    f"The run has checkpoints, but none of them is usable: {_list(search.left_out)} (looked in "
                    f"{looked}). nemo2 does not start from the beginning next to them. Repair or remove them, or "
                    f"{new_name()}."
                )
            if not self.resume_ignore_no_checkpoint and self.restore_config is None:
                raise CheckpointError(
                    "resume.resume_if_exists=True, but there is no finished checkpoint to resume from (looked in "
                    f"{looked}). To start from the beginning in this case, set "
                    "resume.resume_ignore_no_checkpoint=True."
                )
            beginning = "the beginning" if self.restore_config is None else f"{self.restore_config.path}"
            # The console shows the first of these only: a new run is expected to start there.
            why = (
                "The run was interrupted before its first checkpoint: there is none"
                if search.begun
                else "No checkpoint"
            )
            message = f"{why} to resume from in {looked}; starting from {beginning}."
            if self.resume_from_directory:  # rather a wrong name than a new run
                if trainer.is_global_zero:
                    _log.warning("%s", message)
            else:
                rank_zero_info(message)
            return None
        assert search.manifest is not None
        limit, weights_only = trainer.max_steps, search.manifest.weights_only
        if training and not self.resume_past_end:
            _refuse_finished(search, limit)
        io: Any = getattr(trainer.strategy, "checkpoint_io", None)
        if hasattr(io, "fall_back"):  # nobody named this checkpoint, so a damaged one may be passed over
            io.fall_back = True
        if training and weights_only and search.whole is not None:
            rank_zero_info(
                f"{search.newest} holds weights only. Resuming from {search.whole} (step {search.whole_step}) and repeating "
                "the steps since then."
            )
            return search.whole
        if training:
            refuse_weights_only(search.newest)
        rank_zero_info(
            f"Resuming from {search.newest} (step {search.manifest.step}).\nFor another run instead, {new_name()}."
        )
        return search.newest

    def checkpoint_in(self, directory: Path) -> Optional[Path]:
        """The checkpoint from which a run with its checkpoints in ``directory`` starts, unchecked. None: it starts from
        the beginning or from other weights."""
        search = self._newest_for(directory) if self.resume_if_exists else Search()
        named = checkpoint_at(self.resume_from_path) if self.resume_from_path else None
        return search.newest if named is None or _continues(search, named) else named

    def get_context_path(self, model: Any = None) -> Optional[Path]:
        """The ``context/`` of the weights to start from. None without such weights, and for released weights, which
        have none."""
        checkpoint = None if self.restore_config is None else self.restore_config.checkpoint
        return None if checkpoint is None else checkpoint / CONTEXT_PATH

    def _resumable(self, trainer: pl.Trainer, directory: Optional[Path]) -> Search:
        """Search for a checkpoint. Before process groups exist every rank searches the shared file system.
        Afterwards rank 0 searches and sends its result to the others."""
        if not torch.distributed.is_initialized():
            return self._look(trainer, directory)
        search = self._look(trainer, directory) if trainer.is_global_zero else Search()
        return trainer.strategy.broadcast(search)

    def _look(self, trainer: pl.Trainer, directory: Optional[Path]) -> Search:
        """Search ``resume_from_directory`` for checkpoints of any run, or the run's own directory for its own
        checkpoints.

        The logger has already continued the newest version of the run's name, so the checkpoint callback points to that
        directory.
        """
        saves = trainer.checkpoint_callback
        if saves is not None:
            # Without our logger the callback saves below Lightning's root.
            directory = Path(getattr(saves, "dirpath", None) or Path(trainer.default_root_dir) / "checkpoints")
        # Before the process group exists, other ranks search at the same time.
        alone = trainer.world_size == 1 or torch.distributed.is_initialized()
        if directory is not None and alone:
            publish_written(directory)
        return self._newest_for(directory)

    def _newest_for(self, directory: Optional[Path]) -> Search:
        own = _newest([directory] if directory is not None else [], any_run=False)
        if not self.resume_from_directory:
            return own
        other = _newest(checkpoint_folders(Path(self.resume_from_directory).expanduser()), any_run=True)
        return own if _continues(own, other.newest) else other


def refuse_unresumable(directory: Path, *, max_steps: int, past_end: bool = False) -> None:
    """Raise the error with which training would refuse to resume the run whose checkpoints are in ``directory``.

    Raises:
        RunFinished: the run has reached ``max_steps``, and ``past_end`` is False. The message says how to continue.
        CheckpointError: its only checkpoint holds weights without the optimizer.
    """
    search = _newest([directory], any_run=False)
    if not past_end:
        _refuse_finished(search, max_steps)
    if search.newest is not None and search.whole is None:
        refuse_weights_only(search.newest)


def _continues(own: Search, start: Optional[Path]) -> bool:
    """Whether the run of the checkpoints ``own`` began at ``start``, a checkpoint of another run, or went back to ``start``, its
    own, and has gone on since."""
    begun = None if start is None else read_manifest(start)
    if begun is None or not begun.run or own.manifest is None:
        return False
    if own.manifest.run == begun.run:
        return own.manifest.returned_to[-1:] == [begun.saved_at]
    return own.manifest.lineage == [*begun.lineage, begun.run] and own.manifest.step > begun.step


def newest_to_resume(*directories: Path, any_run: bool = False) -> Optional[Path]:
    """The checkpoint in these directories that training would resume from. None: there is none. ``any_run``: also one of another
    run than a directory's own."""
    return _newest([*directories], any_run=any_run).whole


def _refuse_finished(search: Search, max_steps: int) -> None:
    if search.manifest is not None and 0 < max_steps <= search.manifest.step:
        raise RunFinished(
            f"{_run_of(search.newest)} is complete: it is at step {search.manifest.step}, and "
            f"trainer.max_steps={max_steps}. {_how_to_go_on(search)}"
        )


def _how_to_go_on(search: Search) -> str:
    """The changes that work for this run. Each of them works alone."""
    assert search.manifest is not None
    another = f"For a second run, {new_name()}."
    if not search.manifest.weights_only:
        return (
            f"To train further, raise trainer.max_steps. {another} To resume without training further, set "
            "resume.resume_past_end=True."
        )
    if search.whole is not None:
        return (
            f"To train further from step {search.whole_step}, the last step that was saved with the optimizer, raise "
            f"trainer.max_steps. {another}"
        )
    return _from_weights(search.newest)


def refuse_weights_only(path: Path) -> None:
    """Refuse to resume from a checkpoint without the optimizer's state.

    Raises:
        CheckpointError: it is one.
    """
    manifest = read_manifest(path)
    if manifest is not None and manifest.weights_only:
        raise CheckpointError(
            f"{path} holds weights only: it was saved at the end of training, or with log.ckpt.save_weights_only=True, so it "
            f"cannot be resumed. {_from_weights(path)}"
        )


def _from_weights(path: Optional[Path]) -> str:
    source = _run_of(path)
    return (
        f"For a second run, {new_name()}. To train on from its weights, also set "
        f"{advice(f'--from {source}', f'resume.restore_config.path={source}')}. With "
        "log.ckpt.save_optim_on_train_end=True, a run can be continued after its end, and without "
        "log.ckpt.save_weights_only before it."
    )


def _run_of(checkpoint: Optional[Path]) -> Optional[Path]:
    """The directory of the checkpoint's run; a checkpoint outside a run stands for itself."""
    return (
        checkpoint.parent.parent if checkpoint is not None and checkpoint.parent.name == "checkpoints" else checkpoint
    )


def _list(left_out: dict[Path, str]) -> str:
    return "; ".join(f"{path} ({reason})" for path, reason in list(left_out.items())[:5])


def _newest(directories: list[Path], *, any_run: bool) -> Search:
    search = Search(looked_at=directories)
    usable: list[tuple[Path, Manifest]] = []
    for directory in directories:
        if (manifest := read_manifest(directory)) is not None:
            stored = [(directory, manifest)]
        else:
            stored = finished(directory)
            search.left_out |= unusable(directory)
        run = None if any_run else run_of(directory)
        search.begun |= run is not None
        search.left_out |= {
            path: (
                f"belongs to run {manifest.run}, but this directory belongs to run {run.id}; resume.resume_from_path "
                "accepts it"
            )
            for path, manifest in stored
            if run is not None and not belongs(manifest, run)
        }
        usable += own(stored, run)
    for path, manifest in sorted(
        usable, key=lambda item: (0 if any_run else len(item[1].returned_to), item[1].step, item[1].saved_at)
    ):
        search.newest, search.manifest = path, manifest
        if not manifest.weights_only:
            search.whole, search.whole_step = path, manifest.step
    return search
