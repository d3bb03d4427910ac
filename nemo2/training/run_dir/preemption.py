# SPDX-License-Identifier: Apache-2.0
"""Saves and stops a run on SIGTERM, when its terminal closes, or on the signal that Slurm sends before the time
limit."""

import logging
import signal
import threading
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch

from nemo2.base import ranks
from nemo2.base.advice import again
from nemo2.base.errors import ConfigError, Preempted
from nemo2.base.names import did_you_mean
from nemo2.base.place import here
from nemo2.base.variables import replaced
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint, ends_now
from nemo2.config.capture import configurable
from nemo2.training.run_dir.faults import record_fault

_log = logging.getLogger(__name__)
_REFUSED = ("SIGKILL", "SIGSTOP")
_ALSO = (signal.SIGHUP, signal.SIGUSR1)
"""Signals that would end the process without a save. They are handled unless another handler, such as Lightning's
requeueing, is installed or ``nohup`` ignores them."""


@configurable
class PreemptionCallback(pl.Callback):
    """Save a checkpoint after the step in which a signal reached any rank, and end the run with exit code 143.

    ``llm.pretrain`` adds this callback with its defaults, unless the trainer has its own. Every rank listens for
    signals. After each step the ranks agree on whether any of them received one, with an all-reduce of one number
    between the CPUs (gloo), which doesn't wait for the GPU. A second signal changes nothing. A signal during validation
    takes effect after the current validation batch.

    The callback replaces Lightning's SIGTERM handler from the start of training, because that handler broadcasts inside
    the handler on the ranks that received the signal, even during another collective. When its teardown ends, Lightning
    restores the handlers from before the trainer. Until then a signal can't disturb a run that is already ending, which
    matters because a launcher signals the remaining ranks as soon as the first rank has ended.

    Args:
        sig: One signal or a list, by number or name ("SIGUSR2"; Slurm: ``#SBATCH --signal=USR2@120``), besides SIGTERM,
            by which every scheduler ends a job. None: SIGTERM; SIGHUP and SIGUSR1, unless they are already handled or
            ignored; and SIGINT in ranks of torchrun, which forwards Ctrl-C to them. Elsewhere, as in a notebook, SIGINT
            still raises Python's KeyboardInterrupt, and Lightning ends the loop with SystemExit(1).

    Raises:
        ConfigError: an unknown signal, or a signal that can't be caught.
    """

    def __init__(self, sig: Optional[Union[int, str, list[Union[int, str]]]] = None) -> None:
        self.sig = sig
        requested = [] if sig is None else sig if isinstance(sig, list) else [sig]
        self.signals = [signal_of(item, owner="PreemptionCallback") for item in requested]
        """The requested signals. Empty: the default signals."""
        self._received: Optional[signal.Signals] = None
        self._group: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._received = None
        if torch.distributed.is_initialized() and torch.distributed.get_backend() != "gloo":
            self._group = torch.distributed.new_group(backend="gloo")
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread only
        for number in {*self.signals, signal.SIGTERM} if self.signals else _default_signals():
            signal.signal(number, self._record_signal)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not ends_now(trainer):  # the end of training saves
            self._stop_if_signaled(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not ends_now(trainer):
            self._stop_if_signaled(trainer)

    def _record_signal(self, number: int, frame: Any) -> None:
        # No more than this, because a handler can run between any two instructions.
        self._received = self._received or signal.Signals(number)

    def _stop_if_signaled(self, trainer: pl.Trainer) -> None:
        # The signal that some rank received, the same on all ranks.
        received = 0 if self._received is None else int(self._received)
        received = int(ranks.largest(torch.tensor([received], dtype=torch.int32), group=self._group)) or None
        if received is None:
            return
        saved = _save(trainer)
        error = Preempted(
            f"{signal.Signals(received).name} after step {trainer.global_step}: "
            + (
                f"saved {saved}.\nTo go on, run: {again()}"
                if saved
                else "nothing was saved, because the run has no ModelCheckpoint callback. Set log.ckpt."
            )
        )
        if trainer.is_global_zero:
            _log.warning("%s", error.message)
        record_fault(error, step=trainer.global_step)
        raise error


def _default_signals() -> list[signal.Signals]:
    free = [number for number in _ALSO if signal.getsignal(number) is signal.SIG_DFL]
    return [signal.SIGTERM, *free, *([signal.SIGINT] if here().launcher == "torchrun" else [])]


def _save(trainer: pl.Trainer) -> str:
    """Save with the trainer's checkpoint callback and wait until the checkpoint is complete. Returns its path, or ""
    without such a callback."""
    callback = next((item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)), None)
    if callback is None:
        return ""
    with replaced(callback, verbose=False):  # the message that follows names the checkpoint
        callback.save(trainer, weights_only=False)
        io: Any = trainer.strategy.checkpoint_io
        if hasattr(io, "maybe_finalize_save_checkpoint"):
            io.maybe_finalize_save_checkpoint(blocking=True)
    return callback.last_model_path


def signal_of(item: Union[int, str], *, owner: str) -> signal.Signals:
    """A signal by number or name. ``owner`` is the class of the argument ``sig``.

    Raises:
        ConfigError: an unknown signal, or a signal that can't be caught.
    """
    known = [number.name for number in signal.Signals if number.name not in _REFUSED]
    try:
        number = signal.Signals[item] if isinstance(item, str) else signal.Signals(item)
        if number.name in _REFUSED:
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(
            f"{owner}.sig={item!r}: not a signal that a process can catch{did_you_mean(str(item), known)}"
        ) from None
    return number
