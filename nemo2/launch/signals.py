# SPDX-License-Identifier: Apache-2.0
"""Signals of the process that has launched a run: they end its ranks on the way out, whoever has put handlers in place."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def own_signals() -> Iterator[None]:
    """Put the signals that end a run back as they were afterwards, whoever changed them."""
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
    """SIGINT raises KeyboardInterrupt, the others SystemExit with 128 and their number, so that the ranks are ended on the way
    out. What ``nohup`` has told this process to ignore stays so."""
    if threading.current_thread() is not threading.main_thread():
        return

    def terminate(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDING[1:]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
