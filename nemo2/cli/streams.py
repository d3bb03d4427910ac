# SPDX-License-Identifier: Apache-2.0
"""The standard streams of a command: closed, on a full disk, or a pipe whose reader has gone."""

import contextlib
import os
import sys
from typing import Optional


def open_missing() -> None:
    """Put /dev/null in the place of standard streams that the command was started without (`nemo2 check ... >&-`): libraries ask
    them whether they are terminals, and the next file that is opened would get the number, and what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def why_output_is_refused() -> Optional[str]:
    """The system's word on why standard output takes no more; None where it does."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def drop_output() -> None:
    """What is still to be written, at the interpreter's end too, goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
