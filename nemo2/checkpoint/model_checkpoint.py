# SPDX-License-Identifier: Apache-2.0
"""Decides when checkpoints are saved, how they are named, and which checkpoints are kept."""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]

from nemo2.base import ranks
from nemo2.base.counts import is_count, require_counts
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.names import check_choice, did_you_mean
from nemo2.checkpoint.directory import LAST_SUFFIX, Manifest, commit, finished, remove, saving_to, without_last
from nemo2.checkpoint.leftovers import clean_up
from nemo2.checkpoint.lineage import Run, begin, own
from nemo2.checkpoint.lock import DirectoryLock
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.config.notices import warn_without_effect

_log = logging.getLogger(__name__)
_FIELD = re.compile(r"\{([^{}:!]+)(?::([^{}]*))?\}")
_UNIQUE = ("step", "consumed_samples")
"""Fields of ``filename`` that differ between any two checkpoints of a run."""
_STEPS = (10_000_001, 10_000_002)
"""Steps whose names must differ. A format such as ``.1e`` gives both the same one."""
_LONGEST_NAME = 200
"""Bytes of a checkpoint's name. File systems take 255, of which the names of unfinished saves need some."""

_BEST = "the best checkpoints by monitor are kept (save_top_k). Leave it out."
register_gone(
    "nemo2.checkpoint.model_checkpoint:ModelCheckpoint",
    save_best_model=_BEST,
    try_restore_best_ckpt=_BEST,
    enable_nemo_ckpt_io="set always_save_context instead.",
    save_on_exception=(
        "after an error, ranks may differ in what they hold. Set every_n_train_steps or train_time_interval, and leave it out."
    ),
)


@configurable
@dataclass(eq=False)
class ModelCheckpoint(Checkpoint):
    """Save checkpoints of the run and delete old ones.

    A checkpoint appears under its name only when it is complete. The newest checkpoint is never deleted. A run whose
    directory holds checkpoints of another run ends before its first step.

    A save is due every ``every_n_train_steps`` steps, every ``train_time_interval`` and every ``every_n_epochs``
    epochs. With none of them set, it is due after every validation. One more save follows the end of training. A step
    that is both saved and validated is saved after its validation, with that validation's metrics. A checkpoint never
    records the metrics of an earlier step or validation.

    After each save the callback keeps the ``save_top_k`` best checkpoints by ``monitor``, the newest, and the one that the run
    last went back to (``resume.resume_from_path``). Checkpoints without a validation, or whose metric isn't finite, rank last.
    Until the run has reached ``max_steps``, it also keeps the newest one that can be resumed, such as the save of a signal in a
    run with ``save_weights_only``.

    Raises:
        ConfigError: a value out of its range.
    """

    monitor: Optional[str] = "val_loss"
    """The logged metric to rank by. None: newer checkpoints rank higher."""
    verbose: bool = True
    """Log each save and deletion."""
    save_last: Optional[Union[bool, Literal["link"]]] = True
    """Mark the newest checkpoint with ``-last`` in its name, as NeMo does. "link" means the same. False: no mark. The newest
    checkpoint is kept either way."""
    save_top_k: int = 3
    """The number of best checkpoints to keep. -1: all. 0: only the newest."""
    save_weights_only: bool = False
    """Leave out the states of the optimizer, the schedule and the loop. Such a checkpoint can't be resumed. A save on a signal
    has them all the same."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest metric is the best."""
    every_n_epochs: Optional[int] = None
    """Save after the validation of every n-th epoch, or at its end in a run that doesn't validate, beside the other
    intervals. None: see above."""
    every_n_train_steps: Optional[int] = None
    """The interval between saves, in optimizer steps."""
    train_time_interval: Optional[timedelta] = None
    """The wall time between saves."""
    save_on_train_epoch_end: Optional[bool] = False
    """Save at the end of an epoch rather than after its validation."""
    save_optim_on_train_end: Optional[bool] = False
    """Keep the optimizer's state in the checkpoint of the last step, so that training can be extended. The state doubles to
    triples the size."""
    always_save_context: bool = True
    """Save ``context/`` with every checkpoint."""
    save_context_on_train_end: bool = True
    """Save ``context/`` with the last checkpoint of training, whatever ``always_save_context`` says."""
    dirpath: Optional[str] = None
    """The directory of the checkpoints. None: the logger sets ``<run>/checkpoints``."""
    filename: Optional[str] = None
    """The name of a checkpoint, with ``{model_name}``, ``{step}``, ``{consumed_samples}``, ``{epoch}`` and logged metrics,
    each with an optional format specification. As in Lightning, ``name=`` precedes each value except ``model_name``. It needs
    ``{step}`` or ``{consumed_samples}``: a checkpoint replaces another of the same name. ``{epoch}`` will do where only
    ``every_n_epochs`` is set. None: `default_filename`."""
    auto_insert_metric_name: bool = True
    """Insert ``name=`` before each value of ``filename``."""
    enable_version_counter: bool = False
    """Accepted for Lightning's signature, without effect. A checkpoint replaces another of the same name, because the name
    contains the step."""

    def __post_init__(self) -> None:
        warn_without_effect(
            "A checkpoint replaces another of the same name, because the name contains the step.",
            enable_version_counter=(self.enable_version_counter, False),
        )
        check_choice("log.ckpt.mode", self.mode, Literal["min", "max"])
        if not is_count(self.save_top_k, least=-1):
            raise ConfigError(
                f"log.ckpt.save_top_k={self.save_top_k}: must be -1 (keep all), 0 (keep only the newest) or more."
            )
        intervals = {name: getattr(self, name) for name in ("every_n_train_steps", "every_n_epochs")}
        require_counts("log.ckpt", least=0, others=(None,), **intervals)
        interval = self.train_time_interval
        if interval is not None and not (isinstance(interval, timedelta) and interval > timedelta(0)):
            raise ConfigError(
                f"log.ckpt.train_time_interval={interval}: must be a timedelta of more than 0 seconds, such as "
                "timedelta(minutes=15), or unset."
            )
        self.every_n_train_steps = self.every_n_train_steps or None
        self.dirpath = str(Path(self.dirpath).expanduser()) if self.dirpath else None
        self.filename = self.filename or default_filename(self.monitor)
        self.model_name: Optional[str] = None
        """The value of ``{model_name}``: the run's name, which the logger sets. None: the module's class name."""
        self._check_filename(self.filename)
        self.best_model_path = ""
        self.best_model_score: Optional[float] = None
        self.last_model_path = ""
        self.num_saves = 0
        """The saves that have begun. One that replaces the last is the same save."""
        self.num_published = 0
        """The saves among them whose checkpoints exist."""
        self._last_target: Optional[Path] = None
        self._last_saved_step = -1
        self._last_saved_at = 0.0
        self._last_has_context = True
        self._last_is_weights_only = False
        self._lock: Optional[DirectoryLock] = None
        self._run: Optional[Run] = None
        """The run that these checkpoints belong to. Set on rank 0 only."""
        self.requested: Optional[Path] = None
        """The checkpoint of ``resume.resume_from_path``, if the run resumes from it. `AutoResume` sets it."""
        self._due = False
        """Whether to save after the validation that follows this step."""
        self._validated_step = -1
        self._latest: dict[str, torch.Tensor] = {}
        """The metrics after the last step or its validation."""
        self._earlier: dict[str, torch.Tensor] = {}
        """The metrics before the current step. One that is still there unchanged isn't of this step."""
        self._monitor_is_known = False
        """The monitored metric has been logged, or its absence has been reported."""

    def _check_filename(self, template: str) -> None:
        """Refuse a name that can't be written, or that two checkpoints would share."""
        place = f"log.ckpt.filename={template!r}"
        fields = {match.group(1) for match in _FIELD.finditer(template)} - {"model_name"}
        if set("{}") & set(_FIELD.sub("", template)):
            raise ConfigError(
                f"{place}: braces must enclose a name, or a name and its format, such as {{step}} or {{val_loss:.2f}}. "
                "Correct or remove the others."
            )
        for match in _FIELD.finditer(template):
            name = match.group(1)
            sample = "model" if name == "model_name" else _STEPS[0] if name in (*_UNIQUE, "epoch") else 1.0
            try:
                format(sample, match.group(2) or "")
            except (OverflowError, ValueError) as error:
                raise ConfigError(
                    f"{place}: {match.group(0)} can't be written ({error}). Correct its format, such as "
                    f"{{{name}}}{f' or {{{name}:.2f}}' if isinstance(sample, float) else ''}."
                ) from error
        by_epoch = self.every_n_epochs and not self.every_n_train_steps and self.train_time_interval is None
        unique = {*_UNIQUE, *(("epoch",) if by_epoch else ())}
        values: dict[str, Any] = {**dict.fromkeys(fields, 1.0), "epoch": 1}
        names = [self.format_checkpoint_name(values | dict.fromkeys(unique, step)) for step in _STEPS]
        if not fields & unique or names[0] == names[1]:
            raise ConfigError(
                f"{place}: must contain {{step}} or {{consumed_samples}} with all digits, or each checkpoint replaces the one "
                f"before it, the best one too. Set {template + '-{step}'!r}."
            )
        if template.startswith(".") or not names[0].isprintable() or len(names[0].encode()) > _LONGEST_NAME:
            raise ConfigError(
                f"{place}: must give a name of at most {_LONGEST_NAME} bytes, without control characters and without a dot at "
                "its beginning: no resume looks at hidden folders. Shorten it, or remove these characters."
            )

    # ------------------------------------------------------------------------------------------------------ when

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        if stage != "fit":
            return
        self._on_rank_zero(self._lock_directory)  # one run per directory
        if trainer.is_global_zero:
            for path in clean_up(Path(self.dirpath)):
                rank_zero_info(f"Deleted {path.name}, which an interrupted save had left.")

    def _lock_directory(self) -> None:
        if self._lock is None:
            self._lock = DirectoryLock(str(self.dirpath)).acquire()

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0. A failure raises on every rank.

        Raises:
            CheckpointError: on every rank, if ``action`` failed.
        """
        ranks.on_rank_zero(saving_to(str(self.dirpath))(action), error=CheckpointError)

    def _unlock_directory(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._unlock_directory()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._unlock_directory()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_saved_at = time.monotonic()
        self._last_saved_step = trainer.global_step
        self._last_has_context = True
        self._last_is_weights_only = False
        self._latest = dict(trainer.callback_metrics)
        # Only now does Lightning report the checkpoint that it resumed from.
        self._on_rank_zero(lambda: self._begin(trainer))

    def _begin(self, trainer: pl.Trainer) -> None:
        if self._run is None or trainer.ckpt_path or trainer.global_step == 0:  # else a second fit continues the run
            checkpoint = Path(trainer.ckpt_path) if trainer.ckpt_path else None
            self._run = begin(
                Path(str(self.dirpath)), checkpoint, requested=checkpoint is not None and checkpoint == self.requested
            )
            self.requested = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._earlier = self._latest

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._latest = dict(trainer.callback_metrics)
        step_due = self.every_n_train_steps is not None and trainer.global_step % self.every_n_train_steps == 0
        if step_due or self._time_due(trainer):
            # Whether the loop validates after this batch. Validations by wall time don't count, because
            # ranks could disagree.
            loop: Any = trainer.fit_loop
            self._due = getattr(trainer, "_val_check_time_interval", None) is None and bool(
                loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
            )
            if not self._due:
                self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated_step = trainer.global_step
        self._latest = dict(trainer.callback_metrics)
        if self._due:
            self._due = False
            self.save(trainer)
        by_interval = self.every_n_train_steps is not None or self.train_time_interval is not None
        if self.save_on_train_epoch_end or (by_interval and not self.every_n_epochs):
            return
        if (trainer.current_epoch + 1) % (self.every_n_epochs or 1) == 0:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        without_validation = self.every_n_epochs and not trainer.limit_val_batches  # pyright: ignore[reportAttributeAccessIssue]
        if not (self.save_on_train_epoch_end or without_validation):
            return
        if (trainer.current_epoch + 1) % (self.every_n_epochs or 1) == 0:
            self.save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.status == "interrupted" or _fast_dev_run(trainer):
            return
        # A run that ends in another way than by max_steps may be meant to go on, so it keeps its optimizer.
        weights_only = not self.save_optim_on_train_end and (self.save_weights_only or _at_max_steps(trainer))
        if self.save_context_on_train_end and not self._last_has_context:
            # The existing save of this step didn't know that training would end here, so this save replaces it.
            self._last_saved_step = -1
        self.save(trainer, weights_only=weights_only, last=True)
        trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)  # pyright: ignore[reportAttributeAccessIssue]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep an epoch that a callback has stopped unfinished: Lightning counts it as finished before `on_train_end`, and a run
        that goes on would leave out the rest of it."""
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                counts["processed"] = counts["completed"] = counts["started"] - 1

    def _time_due(self, trainer: pl.Trainer) -> bool:
        if self.train_time_interval is None:
            return False
        due = time.monotonic() - self._last_saved_at >= self.train_time_interval.total_seconds()
        # One rank's clock decides. Otherwise ranks would save at different steps and wait for each other forever.
        return trainer.strategy.broadcast(due)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(self, trainer: pl.Trainer, *, weights_only: Optional[bool] = None, last: bool = False) -> None:
        """Save now, unless this step is already saved with all that is to be saved. Every rank must call it.

        Args:
            weights_only: Save weights only. None: as ``save_weights_only`` says.
            last: Training ends with this save. False: `ends_now` decides.
        """
        weights_only = self.save_weights_only if weights_only is None else weights_only
        saved = trainer.global_step == self._last_saved_step and (weights_only or not self._last_is_weights_only)
        if _fast_dev_run(trainer) or saved or trainer.global_step == 0:
            return
        assert self.dirpath is not None
        self._last_saved_step, self._last_is_weights_only = trainer.global_step, weights_only
        self._last_saved_at = time.monotonic()
        last = last or ends_now(trainer)
        self._last_has_context = self.always_save_context or (last and self.save_context_on_train_end)
        self._report_unknown_monitor(trainer)
        values = self._values(trainer)
        target = Path(self.dirpath) / self.format_checkpoint_name(values, trainer)
        if self.save_last:
            target = target.with_name(target.name + LAST_SUFFIX)
        self.num_saves, self._last_target = self.num_saves + (target != self._last_target), target
        trainer.save_checkpoint(
            target,
            weights_only=weights_only,
            storage_options={
                "published": lambda path: self._published(trainer, path),
                "metrics": {name: value for name, value in values.items() if isinstance(value, float)},
                "run": self._run.signature() if self._run is not None else None,
                "with_context": self._last_has_context,
            },
        )

    def _report_unknown_monitor(self, trainer: pl.Trainer) -> None:
        """Warn once if the run logs metrics, but not the monitored one. A validation's metric is expected with the first
        validation, and the default, ``val_loss``, isn't missed in a run that never validates."""
        logged = {name for name in trainer.callback_metrics if name not in ("step", "global_step")}
        if self._monitor_is_known or self.monitor is None or self.save_top_k == 0 or not logged:
            return
        validates = bool(getattr(trainer, "limit_val_batches", 1))
        expected_later = self.monitor.startswith("val") and validates and self._validated_step < 0
        if self.monitor not in logged and (expected_later or (self.monitor == "val_loss" and not validates)):
            return
        self._monitor_is_known = True
        if self.monitor not in logged and trainer.is_global_zero:
            kept = "all are kept" if self.save_top_k == -1 else f"the newest {self.save_top_k} are kept"
            _log.warning(
                "log.ckpt.monitor=%r: the run has not logged this metric%s Until it does, checkpoints are not ranked, and "
                "%s. Logged: %s.",
                self.monitor,
                did_you_mean(self.monitor, sorted(logged)),
                kept,
                ", ".join(sorted(logged)),
            )

    def _published(self, trainer: pl.Trainer, path: Path) -> None:
        """Tidy up after a new checkpoint: remove the mark from the former last checkpoint and delete what retention
        doesn't keep."""
        self.num_published += str(path) != self.last_model_path
        self.last_model_path = str(path)
        if self.verbose:
            rank_zero_info(f"Saved {path}.")
        if trainer.is_global_zero:
            try:
                self._retain(path, max_steps=trainer.max_steps)
            except OSError as error:  # the new checkpoint is complete, so this must not
                _log.warning("Old checkpoints could not be tidied up: %s.", error)  # end the run or hold up other ranks
        trainer.strategy.barrier()

    def _retain(self, newest: Path, *, max_steps: int) -> None:
        for path, manifest in own(finished(newest.parent), self._run):
            plain = without_last(path)
            if path != newest and path != plain:
                # A run that went back to an earlier step has saved this step before, under the same name.
                commit(path, plain, manifest.run) if plain.exists() else path.rename(plain)
        checkpoints = own(finished(newest.parent), self._run)
        ranked = self._ranked(checkpoints)
        keep = {path for path, _ in (ranked if self.save_top_k == -1 else ranked[: self.save_top_k])} | {newest}
        if not any(0 < max_steps <= manifest.step for _, manifest in checkpoints[-1:]):  # else the run is complete
            keep |= {path for path, _ in [one for one in checkpoints if not one[1].weights_only][-1:]}
        # The same command names it again.
        keep |= {
            path
            for path, manifest in ranked
            if self._run is not None and manifest.saved_at in self._run.returned_to[-1:]
        }
        for best, manifest in [item for item in ranked if item[0] in keep][:1]:
            self.best_model_path = str(best)
            self.best_model_score = manifest.finite_metric(self.monitor)
        for path, _ in checkpoints:
            if path not in keep:
                remove(path)
                if self.verbose:
                    rank_zero_info(
                        f"Deleted {path.name}, which was neither among the {self.save_top_k} best nor the newest."
                    )

    def _ranked(self, checkpoints: list[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
        sign = 1 if self.mode == "min" else -1

        def rank(item: tuple[Path, Manifest]) -> tuple[int, float, int, int]:
            value, age = item[1].finite_metric(self.monitor), (-len(item[1].returned_to), -item[1].step)
            # Checkpoints without a finite value rank after the others, newest first.
            return (0, sign * value, *age) if value is not None else (1, 0.0, *age)

        return sorted(checkpoints, key=rank)

    # ------------------------------------------------------------------------------------------------------ names

    def _values(self, trainer: pl.Trainer) -> dict[str, Any]:
        values: dict[str, Any] = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if torch.as_tensor(value).numel() == 1 and not _is_same(value, self._earlier.get(name))
        }
        # Lightning has those of the step that it logged last.
        values |= getattr(trainer.strategy, "step_metrics", dict)()
        consumed = getattr(trainer.strategy, "consumed_samples", 0)
        return values | {"step": trainer.global_step, "epoch": trainer.current_epoch, "consumed_samples": consumed}

    def format_checkpoint_name(self, values: dict[str, Any], trainer: Optional[pl.Trainer] = None) -> str:
        """The file name for these values. A metric that was not logged is left out together with its separator."""
        name = type(trainer.lightning_module).__name__.lower() if trainer is not None else "model"
        values = {"model_name": self.model_name or name} | values
        text = template = str(self.filename)
        for match in _FIELD.finditer(template):
            field, pattern = match.group(1), match.group(0)
            if field not in values:
                text = re.sub(re.escape(pattern) + r"-?", "", text)
                continue
            value = values[field]
            label = f"{field}=" if self.auto_insert_metric_name and field != "model_name" else ""
            if isinstance(value, float) and value.is_integer() and match.group(2) is None:
                value = int(value)
            text = text.replace(pattern, label + format(value, match.group(2) or ""))
        return text.replace("/", "_").strip("-").lstrip(".-")  # no resume looks at hidden folders

    def state_dict(self) -> dict[str, Any]:
        return {"best_model_path": self.best_model_path, "best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_path = state_dict.get("best_model_path", "")
        self.best_model_score = state_dict.get("best_model_score")


def default_filename(monitor: Optional[str], model_name: str = "{model_name}") -> str:
    """The ``filename`` of checkpoints for which none is set. It contains the monitored metric, if braces can enclose its
    name."""
    metric = f"--{{{monitor}:.4f}}" if monitor and not set("{}:!") & set(monitor) else "-"
    return f"{model_name}{metric}-{{step}}-{{consumed_samples}}"


def _is_same(value: Any, earlier: Any) -> bool:
    """Whether a metric wasn't logged again. Lightning returns another view of the same memory then."""
    return value is earlier or (
        isinstance(value, torch.Tensor) and isinstance(earlier, torch.Tensor) and value.data_ptr() == earlier.data_ptr()
    )


def ends_now(trainer: pl.Trainer) -> bool:
    """Whether training ends with the current step, as far as it is known: by ``max_steps``, by ``max_epochs``, or because
    a callback (early stopping, ``max_time``, the user's own) has set ``trainer.should_stop``."""
    loop = trainer.fit_loop
    last_epoch = loop.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= loop.max_epochs
    return (
        _at_max_steps(trainer)
        or (last_epoch and loop.epoch_loop.batch_progress.is_last_batch)
        or (trainer.should_stop and loop._can_stop_early)
    )


def _at_max_steps(trainer: pl.Trainer) -> bool:
    return 0 < trainer.max_steps <= trainer.global_step


def _fast_dev_run(trainer: pl.Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # pyright: ignore[reportAttributeAccessIssue]  (Lightning sets it from outside)
