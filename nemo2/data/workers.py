# SPDX-License-Identifier: Apache-2.0
"""Keeps the worker processes of a loader alive while their rank saves on a signal.

torchrun signals a rank's whole process group, and Slurm all processes of a step. A worker that ends by the signal makes torch
raise RuntimeError in the rank, before the rank has saved.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, Optional

from torch.utils.data import DataLoader

from nemo2.base.helper_signals import IGNORED_SIGNALS


def outliving_signals(dataloader: Any) -> Any:
    """The loader, whose workers end with their rank, and not by a signal from elsewhere."""
    if isinstance(dataloader, DataLoader) and not isinstance(dataloader.worker_init_fn, _IgnoreSignals):
        dataloader.worker_init_fn = _IgnoreSignals(dataloader.worker_init_fn)
        context = dataloader.multiprocessing_context or multiprocessing.get_context()
        if dataloader.num_workers > 0 and isinstance(context, ForkContext):
            dataloader.multiprocessing_context = _WorkerContext()
    return dataloader


class _WorkerProcess(ForkProcess):
    """A process that starts with SIGTERM blocked. torch calls ``worker_init_fn`` only after it has started the threads of a
    pool, if the rank has one, and a signal that one thread doesn't block ends the process."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerContext(ForkContext):
    Process = _WorkerProcess


@dataclass(frozen=True)
class _IgnoreSignals:
    """The ``worker_init_fn``: it ignores signals, and then calls the user's.

    SIGKILL and faults end a worker as ever, and so does SIGTERM from its rank, by which torch ends a worker that is stuck.
    """

    then: Optional[Callable[[int], Any]]

    def __call__(self, worker: int) -> None:
        for number in IGNORED_SIGNALS:
            if number != signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
        # Blocked in all threads, so that one thread can see who sent it. A forked process has blocked it from its start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = multiprocessing.parent_process()
        assert parent is not None, "a worker is started by multiprocessing"
        threading.Thread(target=_end_by, args=(parent.pid,), daemon=True, name="signals").start()
        if self.then is not None:
            self.then(worker)


def _end_by(rank: int) -> None:
    """End this process at the first SIGTERM from ``rank``."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)
