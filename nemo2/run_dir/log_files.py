# SPDX-License-Identifier: Apache-2.0
"""One text log per rank: what Python's logging and warnings said, with the time."""

import logging
from pathlib import Path
from typing import Any

from nemo2.files import open_to_write

_NAMES = ("", "lightning.pytorch", "lightning.fabric", "py.warnings")
"""The root logger, and the ones that don't pass their messages on to it."""

_handler: logging.FileHandler | None = None


class _LogFile(logging.FileHandler):
    """A log that is appended to where it is a file, and not through a link that somebody put there."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_to_write)


def add_log_file(path: Path) -> None:
    """Send the log messages of this process (INFO and above) to ``path`` as well; appends, replaces an earlier file.

    Raises:
        UnusableFile: a link or something else that is no file stands there.
    """
    global _handler
    remove_log_file()
    _handler = _LogFile(path, encoding="utf-8")
    _handler.setLevel(logging.INFO)
    _handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    for name in _NAMES:
        target = logging.getLogger(name)
        if name == "" or not target.propagate:
            target.addHandler(_handler)
    ours = logging.getLogger("nemo2")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def remove_log_file() -> None:
    """Stop writing to the file of `add_log_file`; nothing happens if there is none."""
    global _handler
    if _handler is None:
        return
    for name in _NAMES:
        logging.getLogger(name).removeHandler(_handler)
    _handler.close()
    _handler = None
    logging.captureWarnings(False)
