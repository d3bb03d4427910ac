# SPDX-License-Identifier: Apache-2.0
"""Handles standard streams that are closed, on a full disk, or a pipe without a reader."""

import atexit
import contextlib
import io
import os
import sys
import threading
from typing import NoReturn, Optional


def open_missing() -> None:
    """Open /dev/null for each standard stream that is closed (`nemo2 check ... >&-`). Libraries ask these streams
    whether they are terminals. Also, the next file that is opened would get the stream's number, and receive the
    printed text."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # returns the lowest free number: this stream's
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def replace_unknown_characters() -> None:
    """Print "?" for a character that the encoding of standard output doesn't have (``PYTHONIOENCODING=ascii``), instead
    of stopping with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def why_output_is_refused() -> Optional[str]:
    """The system's reason why standard output refuses writes. None: it accepts them."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def drop_output() -> None:
    """Redirect standard output to /dev/null, so that buffered text, even at the end of the interpreter, is
    discarded."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(code: int) -> NoReturn:
    """End this process with ``code``: threads, functions registered with `atexit`, and standard streams as at the end of the
    interpreter, but without taking half a million objects apart. That takes a second, and triton lists each of its types
    that is still in use."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)
