# SPDX-License-Identifier: Apache-2.0
"""Allows one run per directory, with a lock that the kernel releases when its holder ends in any way.

It is a POSIX record lock on ``.lock``. Unlike a ``flock`` lock, the processes that a rank forks don't inherit it, and
it works over NFS (version 4, or version 3 with a lock manager). The file names the holder.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, Optional

from nemo2.base.advice import new_name
from nemo2.base.errors import CheckpointError, RuntimeFault
from nemo2.base.files import UnusableFile, open_to_write, read_bounded
from nemo2.base.place import here

LOCK_FILE = ".lock"
_log = logging.getLogger(__name__)
_held: dict[Path, "DirectoryLock"] = {}
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_POLL_SECONDS = 0.2
_LAUNCH = "launch"
EARLIER_START_SECONDS = 150.0
"""The time to wait for an earlier start of the same launch. On a node that is cut off, the processes see within a
minute that another start has begun, and an NFS server keeps the locks of a lost machine for 90 seconds."""


class DirectoryLock:
    """The lock on ``directory``, held by this process. One process may acquire it several times.

    Args:
        directory: The directory. It is created if it doesn't exist.
        wait_seconds: The time to wait for a holder that is ending.
        earlier_start_seconds: The time to wait for a holder that is an earlier start of this launch.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        wait_seconds: float = 5.0,
        earlier_start_seconds: float = EARLIER_START_SECONDS,
    ) -> None:
        self.directory = Path(directory)
        self.wait_seconds = wait_seconds
        self.earlier_start_seconds = earlier_start_seconds
        self._descriptor: Optional[int] = None
        self._count = 0

    def acquire(self) -> "DirectoryLock":
        """Take the lock. Returns the lock to release: another object if this process already holds the lock.

        Raises:
            CheckpointError: another run, which the message names, holds the lock; or the lock file is a link.
            RuntimeFault: an earlier start of this launch still holds the lock.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        key = self.directory.resolve()
        if key in _held:
            _held[key]._count += 1
            return _held[key]
        try:
            descriptor = open_to_write(self.directory / LOCK_FILE, os.O_RDWR)
        except UnusableFile as error:
            raise CheckpointError(
                f"{self.directory / LOCK_FILE} {error}, and no run has created it. Remove it."
            ) from error
        began, reported = time.monotonic(), False
        while not self._try(descriptor):
            holder = _read(descriptor)
            waited, owner = time.monotonic() - began, _describe(holder)
            ours = here().launch is not None and holder.get(_LAUNCH) == here().launch
            if ours and not reported and waited >= self.wait_seconds:
                reported = True
                _log.warning(
                    "An earlier start of this run still holds %s: %s. Waiting for it to end.", self.directory, owner
                )
            if waited >= (self.earlier_start_seconds if ours else self.wait_seconds):
                os.close(descriptor)
                if ours:
                    raise RuntimeFault(
                        f"An earlier start of this run has kept writing to {self.directory} for another {waited:.0f} "
                        f"s: {owner}. It runs on a node that the scheduler no longer sees. End the process there."
                    )
                raise CheckpointError(
                    f"Another run is writing to {self.directory}: {owner}. Two runs would delete each other's "
                    "checkpoints. Wait for the other run, stop it, or, for this run, "
                    f"{new_name()} or log.version."
                )
            time.sleep(_POLL_SECONDS)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_owner()).encode(), 0)
        self._descriptor, self._count = descriptor, 1
        _held[key] = self
        return self

    def release(self) -> None:
        """Release the lock, once for every `acquire`."""
        self._count -= 1
        if self._count > 0 or self._descriptor is None:
            return
        _held.pop(self.directory.resolve(), None)
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None

    def _try(self, descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                _log.warning(
                    "%s is on a file system without locks, so nemo2 cannot prevent a second run from writing to the "
                    "same directory.",
                    self.directory,
                )
                return True
            return False
        return True


def holds(directory: Path) -> bool:
    """Whether this process holds the lock of ``directory``."""
    return directory.resolve() in _held


def holder_is_dead(directory: Path) -> bool:
    """Whether the last holder of the lock of ``directory`` ran on this host and was killed. False too: it isn't known."""
    try:
        owner = json.loads(read_bounded(directory / LOCK_FILE, at_most=4096, follow=False))
        if owner["host"] == socket.gethostname():
            os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        pass
    return False


def _owner() -> dict[str, Any]:
    job, launch = here().job, here().launch
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        **({"job": job} if job else {}),
        **({_LAUNCH: launch} if launch else {}),
    }


def _read(descriptor: int) -> dict[str, Any]:
    """The holder's description of itself. {}: unreadable."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any]) -> str:
    try:
        job = f", job {owner['job']}" if "job" in owner else ""
        return f"process {owner['pid']} on {owner['host']}{job}, since {owner['since']}"
    except KeyError:
        return "an unknown process"
