# SPDX-License-Identifier: Apache-2.0
"""One text log per rank with the messages of Python's logging and warnings and their times, and nemo2's warnings on
the console of one rank."""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

from nemo2.base.files import open_to_write
from nemo2.base.noise import send_to, verbose
from nemo2.training.run_dir.environment import redact_text

_NAMES = ("", "lightning.pytorch", "lightning.fabric", "py.warnings")
"""The root logger, and the loggers that don't propagate their messages to it."""

_handler: logging.FileHandler | None = None


class _Redacted(logging.Formatter):
    """Removes secrets, because other libraries log the values that they receive."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file that is appended to, but not through a link. What can't be written is reported once and doesn't end the
    run."""

    reported = False

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_to_write)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except (
            OSError
        ):  # FileHandler opens a file that another library has closed, outside of its own handling of errors
            self.handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, of which `emit` has reported
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.reported:
            self.reported = True
            print(f"nemo2: the log {self.baseFilename} can't be written: {error}", file=sys.stderr, flush=True)


class _Console(logging.Handler):
    """Python's handler of last resort writes warnings to stderr only until another handler, such as the log file's,
    exists. This handler replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(map(_writes_to_console, logging.getLogger().handlers)):
            print(self.format(record), file=sys.stderr, flush=True)


def _writes_to_console(handler: logging.Handler) -> bool:
    """Whether the handler writes to a console: Python's own, or rich's."""
    to_stream = isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    return to_stream or type(handler).__name__ == "RichHandler"


_console = _Console(logging.WARNING)


def warn_on_console() -> None:
    """Show nemo2's warnings on this process's stderr, and with ``nemo2 -v`` all its messages, unless the script has
    its own console handler. Idempotent."""
    _console.setLevel(logging.INFO if verbose() else logging.WARNING)
    logging.getLogger("nemo2").addHandler(_console)


def add_log_file(path: Path) -> None:
    """Also write this process's log messages (INFO and above) to ``path``. Appends, and replaces an earlier file.

    Raises:
        UnusableFile: ``path`` is a link or not a regular file.
    """
    global _handler
    remove_log_file()
    _handler = _LogFile(path, encoding="utf-8")
    _handler.setLevel(logging.INFO)
    _handler.setFormatter(_Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    for name in _NAMES:
        target = logging.getLogger(name)
        if name == "" or not target.propagate:
            target.addHandler(_handler)
    send_to(_handler)
    ours = logging.getLogger("nemo2")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def remove_log_file() -> None:
    """Stop writing to the file of `add_log_file`. Does nothing if there is none."""
    global _handler
    if _handler is None:
        return
    send_to(None)
    for name in _NAMES:
        logging.getLogger(name).removeHandler(_handler)
    _handler.close()
    _handler = None
    logging.captureWarnings(False)
