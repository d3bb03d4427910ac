# SPDX-License-Identifier: Apache-2.0
"""One text log per rank, of what Python's logging and warnings said, with the time; our warnings on the console of one rank."""

import logging
import sys
from pathlib import Path
from typing import Any

from nemo2.files import open_to_write
from nemo2.noise import send_to, verbose
from nemo2.run_dir.environment import redact_text

_NAMES = ("", "lightning.pytorch", "lightning.fabric", "py.warnings")
"""The root logger, and the ones that don't pass their messages on to it."""

_handler: logging.FileHandler | None = None


class _Redacted(logging.Formatter):
    """Without secrets: other libraries log what they are given."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _LogFile(logging.FileHandler):
    """A log that is appended to where it is a file, and not through a link that somebody put there."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_to_write)


class _Console(logging.Handler):
    """Python's last resort, which writes warnings to stderr, goes silent once any handler is there, as that of the log file."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(map(_speaks, logging.getLogger().handlers)):
            print(self.format(record), file=sys.stderr, flush=True)


def _speaks(handler: logging.Handler) -> bool:
    """Whether it writes to a console: Python's own, or rich's."""
    to_stream = isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    return to_stream or type(handler).__name__ == "RichHandler"


_console = _Console(logging.WARNING)


def warn_on_console() -> None:
    """Show the warnings of nemo2 on this process' stderr, with ``nemo2 -v`` all that it logs, unless the script has a console
    handler of its own. Idempotent."""
    _console.setLevel(logging.INFO if verbose() else logging.WARNING)
    logging.getLogger("nemo2").addHandler(_console)


def add_log_file(path: Path) -> None:
    """Send the log messages of this process (INFO and above) to ``path`` as well; appends, replaces an earlier file.

    Raises:
        UnusableFile: a link or something else that is no file stands there.
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
    """Stop writing to the file of `add_log_file`; nothing happens if there is none."""
    global _handler
    if _handler is None:
        return
    send_to(None)
    for name in _NAMES:
        logging.getLogger(name).removeHandler(_handler)
    _handler.close()
    _handler = None
    logging.captureWarnings(False)
