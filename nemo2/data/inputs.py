# SPDX-License-Identifier: Apache-2.0
"""The files that a run's data comes from, as they were when the run opened them. Checkpoints store this record, so that
a resumed run notices an input whose contents have changed.

A file whose size and time of modification are those of the record is taken as unchanged. If only the time differs, the
SHA-256 decides. Who rewrites a file with the same size and the same time isn't noticed.
"""

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Optional

from nemo2.base.files import sha256

_log = logging.getLogger(__name__)
_HASHED_AT_ONCE = 1 << 30
"""Bytes of all inputs without a known hash up to which they are hashed at the start of a run: some seconds."""
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file, or another source of records.

    Attributes:
        path: the file's path, or the source's name.
        size: the size of the file in bytes. None: it isn't known, and the hash alone decides.
        modified: the time of its last modification in nanoseconds.
        sha256: the SHA-256 of its contents. None: unknown.
        trains: whether training reads it.
        exact: whether another hash proves other contents.
    """

    path: str
    size: Optional[int] = None
    modified: Optional[int] = None
    sha256: Optional[str] = None
    trains: bool = field(default=True, compare=False)
    exact: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, path: str) -> "Input":
        """The file as it is now."""
        status = os.stat(path)
        return cls(path=path, size=status.st_size, modified=status.st_mtime_ns)

    def record(self) -> dict[str, Any]:
        """The fields that a checkpoint stores, as plain JSON."""
        return {name: asdict(self)[name] for name in ("size", "modified", "sha256")}

    def difference(self) -> Optional[str]:
        """How the file's size differs from what it was when it was opened, as a clause. None: it doesn't."""
        if self.size is None:
            return None
        try:
            now = f"{os.stat(self.path).st_size} bytes now"
        except OSError as error:
            now = f"{error.strerror} now"
        before = f"{self.size} bytes"
        return None if now == f"{before} now" else f"{self.path} had {before} at the start of the run, {now}"

    def was_rewritten(self) -> bool:
        """Whether the file was written to since it was opened, or isn't there any more."""
        try:
            return self.size is not None and Input.of(self.path) != replace(self, sha256=None)
        except OSError:
            return True

    def hashed(self) -> "Input":
        """The same input with its hash, which is computed if it is unknown. Without a hash: the file can't be read, or
        has changed since it was opened."""
        if self.sha256 is not None or self.size is None:
            return self
        try:
            digest = _sha256(self.path, self.size)
        except OSError:
            return self
        return self if self.was_rewritten() else replace(self, sha256=digest)


def with_hashes(inputs: Iterable[Input]) -> list[Input]:
    """The inputs, with their hashes if these are known or soon computed."""
    inputs = list(inputs)
    unknown = sum(item.size or 0 for item in inputs if item.sha256 is None)
    return [item.hashed() for item in inputs] if unknown <= _HASHED_AT_ONCE else inputs


def _sha256(path: str, size: int) -> str:
    """The SHA-256 of a file. A large file's progress is logged."""
    logged = time.monotonic()

    def report(done: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _SECONDS_BETWEEN_LINES:
            logged = time.monotonic()
            _log.info("Hashing %s: %.1f of %.1f GB.", path, done / 1e9, size / 1e9)

    return sha256(path, report=report)
