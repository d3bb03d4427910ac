# SPDX-License-Identifier: Apache-2.0
"""Handles signals of the launching process, so that they end its ranks even if another library has replaced the
handlers."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ONCE_SECONDS = 1.0
"""``timeout`` and some shells send a signal to a process and then to its group. Within this time it is one signal."""


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the handlers of the signals that end a run afterwards, whoever changed them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def raise_on_signals(*numbers: signal.Signals) -> None:
    """Raise KeyboardInterrupt on SIGINT, and SystemExit with 128 plus the number on other signals, so that the ranks
    are ended. A signal that arrives within a second after one that raised is the same request.

    ``numbers``: the signals; by default, all that end a run.

    Signals that ``nohup`` has set to be ignored stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handled_at = -math.inf

    def terminate(number: int, frame: Any) -> None:
        nonlocal handled_at
        now = time.monotonic()
        if now - handled_at < _ONCE_SECONDS:
            return
        handled_at = now
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in numbers or _ENDING:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
