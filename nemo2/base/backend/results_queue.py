# SPDX-License-Identifier: Apache-2.0
"""The queue through which Megatron-Core's checkpoint writers report, served by a forked process.

Megatron-Core spawns the process that serves it. A spawned process imports the entry script again: seconds before the
first save, and endless recursion for a script without a `__main__` guard. The reason to spawn is CUDA, which does not
survive a fork. The writers themselves are forked either way.
"""

import multiprocessing
import os
import threading
import time
import warnings
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

getter = "get_write_results_queue"
"""The name of the function to replace; older versions mark it as private."""
if not hasattr(filesystem_async, getter):
    getter = f"_{getter}"

_POLL_SECONDS = 0.5


def results_queue(mp_mode: str = "fork") -> Any:
    """The single queue of this process, as in Megatron-Core. `mp_mode` is not used."""
    del mp_mode
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        with warnings.catch_warnings():
            # Python 3.12 warns about forking a process with threads. The child doesn't run their code.
            warnings.simplefilter("ignore", DeprecationWarning)
            manager.start(_end_with, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


def _end_with(parent: int) -> None:
    """A forked server holds copies of its parent's sockets; if it outlived a killed rank, the peers of that rank would
    wait for it instead of seeing the connection close."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
