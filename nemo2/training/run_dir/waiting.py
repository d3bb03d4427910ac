# SPDX-License-Identifier: Apache-2.0
"""Shows a line on a terminal while nothing else appears, because torch and Megatron-Core are imported. The first output
removes the line."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from nemo2.base.place import is_terminal

_AFTER_SECONDS = 0.2
_CLEAR = "\r\033[K"


@contextlib.contextmanager
def waiting_line(what: str, *, after: float = _AFTER_SECONDS) -> Iterator[None]:
    """Show ``what`` on stderr, if that is a terminal, once nothing was printed for ``after`` seconds. A terminal
    that can't clear a line (``TERM=dumb``) keeps it."""
    out, err = sys.stdout, sys.stderr
    line_end, clear = ("", _CLEAR) if is_terminal(err) else ("\n", "")
    if not err.isatty():
        yield
        return
    lock, shown, over = threading.Lock(), False, False

    def show() -> None:
        nonlocal shown
        with lock:
            if not over:
                err.write(f"{what} ...{line_end}")
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
            err.write(clear)
            err.flush()
        if isinstance(sys.stdout, _NotifyingStream):
            sys.stdout = out
        if isinstance(sys.stderr, _NotifyingStream):
            sys.stderr = err

    timer = threading.Timer(after, show)
    timer.daemon = True
    # This reference keeps the streams alive: the first output removes its stream from `sys` while print() still uses
    # it.
    first: tuple[Any, Any] = _NotifyingStream(out, end), _NotifyingStream(err, end)
    sys.stdout, sys.stderr = first
    timer.start()
    try:
        yield
    finally:
        end()


class _NotifyingStream:
    """A stream that calls a function at its first output."""

    def __init__(self, stream: Any, on_output: Any) -> None:
        self._stream, self._on_output = stream, on_output

    def write(self, text: str) -> int:
        self._on_output()
        return self._stream.write(text)

    def fileno(self) -> int:
        self._on_output()  # the caller will write to the descriptor directly
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
