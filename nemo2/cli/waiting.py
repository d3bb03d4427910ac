# SPDX-License-Identifier: Apache-2.0
"""A line on a terminal while a command imports torch and Megatron-Core, which takes seconds; it goes at the first output."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from nemo2.run_dir.terminal import is_terminal

_AFTER_SECONDS = 0.5
_CLEAR = "\r\033[K"


@contextlib.contextmanager
def told_to_wait(what: str, *, after: float = _AFTER_SECONDS) -> Iterator[None]:
    """Show ``what`` on stderr, where that is a terminal, once a command has been silent for so many seconds."""
    out, err = sys.stdout, sys.stderr
    if not is_terminal(err):
        yield
        return
    lock, shown, over = threading.Lock(), False, False

    def show() -> None:
        nonlocal shown
        with lock:
            if not over:
                err.write(f"{what} ...")
                err.flush()
                shown = True

    def end() -> None:
        nonlocal over
        with lock:
            if over:
                return
            over = True
        timer.cancel()
        if shown:
            err.write(_CLEAR)
            err.flush()
        if isinstance(sys.stdout, _First):
            sys.stdout = out
        if isinstance(sys.stderr, _First):
            sys.stderr = err

    timer = threading.Timer(after, show)
    timer.daemon = True
    # Held here: print() has only borrowed the stream that its own output takes out of `sys`.
    first: tuple[Any, Any] = _First(out, end), _First(err, end)
    sys.stdout, sys.stderr = first
    timer.start()
    try:
        yield
    finally:
        end()


class _First:
    """A stream that tells of its first output."""

    def __init__(self, stream: Any, told: Any) -> None:
        self._stream, self._told = stream, told

    def write(self, text: str) -> int:
        self._told()
        return self._stream.write(text)

    def fileno(self) -> int:
        self._told()  # whoever asks writes past this object
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
