# SPDX-License-Identifier: Apache-2.0
"""Decides which files may configure a run: files that nemo2 finds by itself and that decide which code runs, in this
process or in a job.

Such a file belongs to this user or to root, and not everybody may write to it. The table in docs/security.md lists
every place that reads one. A file whose path the user gives (a recipe, ``$NEMO2_RECIPES``) is the user's decision, and
recipes and checkpoints of others are read as data (`nemo2.config.policy`).
"""

import os
import stat
from pathlib import Path
from typing import Optional

from nemo2.base.errors import SecurityError
from nemo2.base.files import MIB, open_regular

KERNEL_CACHE = "TRITON_CACHE_DIR"


def read_trusted(path: Path, *, effect: str) -> str:
    """The text of a configuration file.

    Args:
        path: Where it is.
        effect: What the file decides, for the error: "its lines run in jobs".

    Raises:
        SecurityError: the file, or the link to it, is another user's, or everybody may write to it.
        OSError: it isn't a regular file, is larger than a MiB, or can't be read.
        UnicodeDecodeError: it isn't UTF-8.
    """
    refuse_untrusted(path, effect=effect)
    with open_regular(path) as file:
        # Again for the file that is open: another user may have replaced it meanwhile.
        _refuse(path, os.fstat(file.fileno()), effect)
        data = file.read(MIB + 1)
    if len(data) > MIB:
        raise OSError(f"it is larger than {MIB} bytes")
    return data.decode("utf-8")


def refuse_untrusted(path: Path, *, effect: str) -> None:
    """Raise SecurityError if the file or folder, or the link to it, is another user's, or everybody may write to it.

    Args:
        path: Where it is.
        effect: What it decides, for the error.
    """
    _refuse(path, os.lstat(path), effect)
    _refuse(path, os.stat(path), effect)


def refuse_untrusted_kernel_cache(folder: Optional[str]) -> None:
    """Create the folder of Triton's compiled kernels with mode 0700 if it doesn't exist. None: nothing to do.

    Processes load the kernels as native code.

    Raises:
        SecurityError: it is another user's, or everybody may write to it.
        OSError: it can't be created.
    """
    if folder:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_untrusted(Path(folder), effect=f"ranks load compiled kernels from it ({KERNEL_CACHE})")


def _refuse(path: Path, status: os.stat_result, effect: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise SecurityError(
            f"{path} belongs to another user (uid {status.st_uid}), and {effect}. Move it away or work in another "
            "folder. If you trust its contents, replace it by a copy of your own."
        )
    if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
        raise SecurityError(f"{path} is writable by everybody, and {effect}. Run: chmod o-w {path}")
