# SPDX-License-Identifier: Apache-2.0
"""Handles signals of the launching process, so that they end its ranks even if another library has replaced the
handlers."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


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


def raise_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT, and SystemExit with 128 plus the number on other signals, so that the ranks
    are ended.

    Signals that ``nohup`` has set to be ignored stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def terminate(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDING[1:]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
