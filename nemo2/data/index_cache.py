# SPDX-License-Identifier: Apache-2.0
"""Protects the folder in which Megatron-Core caches its sample indices.

Megatron-Core writes each index with `numpy.save` under its final name and reads it back with ``allow_pickle=True``. A
file that somebody puts beside a corpus would therefore run code, and a half-written file ends the run. Inside `guarded`
an index gets its name only when it is complete, with its SHA-256 beside it. It is read as numbers only, after its hash
has been checked.
"""

import hashlib
import logging
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np

from nemo2.base.errors import DataError
from nemo2.base.files import open_regular, read_bounded, replacing
from nemo2.base.variables import replaced

T = TypeVar("T")
_log = logging.getLogger(__name__)
_HASH = ".sha256"
_HASH_BYTES = 200


class DamagedIndex(DataError):
    """An index whose file ``path`` differs from what was written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"The sample index {path} {why}. Delete it and restart: rank 0 builds what is missing. If the error "
            "returns, the ranks do not see the same file on this file system. Set index_mapping_dir to a folder on "
            "another file system."
        )
        self.path, self.why = path, why

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.why)


def private_directory(root: Path, key: str) -> Path:
    """The folder for ``key`` under ``root``, to which only this user can write. Created if it doesn't exist (mode
    0700).

    Raises:
        DataError: the name belongs to something else, or the folder belongs to another user or isn't writable.
    """
    directory = root / f"{key}-u{os.getuid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode):
            raise DataError(f"{directory} is a link, but the sample index requires a real folder. Remove the link.")
        probe = directory / f".probe-{uuid.uuid4().hex[:8]}"
        open(probe, "x").close()
        # The owner is compared with a file that this process wrote, not with its user id, because a file server may
        # store root's files under another user.
        owner = os.lstat(probe).st_uid
        probe.unlink()
        if status.st_uid != owner:
            raise DataError(
                f"{directory} belongs to another user (id {status.st_uid}), who could change the sample index. Remove "
                "it, or set index_mapping_dir to your own folder."
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.chmod(directory, 0o700)
        for entry in os.scandir(directory):
            if not entry.is_file(follow_symlinks=False):
                raise DataError(
                    f"{entry.path} is not a regular file, but the sample index contains only regular files. Remove it."
                )
    except OSError as error:
        raise DataError(
            f"The sample index can't be written to {directory}: {error}. Set index_mapping_dir to a writable "
            "directory that all ranks share."
        ) from error
    return directory


def rebuilding(build: Callable[[], T], directory: str) -> T:
    """The result of ``build``, called inside `guarded`. If an index is damaged, it is deleted and ``build`` is called
    again.

    Raises:
        DamagedIndex: a newly built index is damaged.
    """
    seen: set[Path] = set()
    while True:
        try:
            with guarded(directory, by_hash=True):
                return build()
        except DamagedIndex as damaged:
            if damaged.path in seen:
                raise
            seen.add(damaged.path)
            _log.warning("The sample index %s %s. nemo2 builds it again.", damaged.path, damaged.why)
            damaged.path.unlink(missing_ok=True)
            _hash_file(damaged.path).unlink(missing_ok=True)


@contextmanager
def guarded(directory: str, *, by_hash: bool) -> Iterator[None]:
    """In this context, numpy reads and writes arrays in ``directory`` as described above.

    Args:
        directory: The folder from `private_directory`.
        by_hash: Compare each file with its hash before it is read. This reads the whole file, so only one rank does it.

    Raises:
        DamagedIndex: on reading, if a file differs from what was written.
    """
    inside = os.path.join(os.path.abspath(directory), "")
    load, save = np.load, np.save

    def load_numbers(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_inside(file, inside):
            return load(file, *args, **kwargs)
        return _checked(Path(file), lambda: load(file, *args, **{**kwargs, "allow_pickle": False}), by_hash=by_hash)

    def save_whole(file: Any, array: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_inside(file, inside):
            save(file, array, *args, **kwargs)
        else:
            write_array(Path(file), np.asanyarray(array))

    with replaced(np, load=load_numbers, save=save_whole):
        yield


def read_array(path: Path, *, by_hash: bool) -> np.ndarray:
    """The array that `write_array` wrote, memory-mapped. A pickle in the file is never run.

    Args:
        by_hash: Compare the file with its hash first. This reads the whole file, so only one rank does it.

    Raises:
        DamagedIndex: the file is missing, or differs from what was written.
    """
    return _checked(path, lambda: np.load(path, mmap_mode="r", allow_pickle=False), by_hash=by_hash)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write the array atomically under its name, after its hash. A file without a hash is not read.

    Raises:
        DataError: the system refuses it, as a full disk does.
    """
    hashed = hashlib.sha256()
    own = partial(replacing, by_user=False, mode=0o600)
    try:
        with own(path) as unfinished, own(_hash_file(path)) as note:
            with open(unfinished, "wb") as file:
                np.lib.format.write_array(_Hashing(file, hashed), array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            note.write_text(f"{hashed.hexdigest()}  {path.name}\n")
    except OSError as error:
        raise DataError(
            f"The sample index {path} can't be written ({error.strerror or error}), and has {array.nbytes:,} bytes. Free "
            "space on its disk, or set index_mapping_dir to a folder on another disk that all ranks share."
        ) from error


class _Hashing:
    """A file that is hashed while it is written."""

    def __init__(self, file: Any, hashed: Any) -> None:
        self.file, self.hashed = file, hashed

    def write(self, content: Any) -> int:
        self.hashed.update(content)
        return self.file.write(content)


def _checked(path: Path, load: Callable[[], T], *, by_hash: bool) -> T:
    if why := _why_damaged(path, by_hash=by_hash):
        raise DamagedIndex(path, why)
    try:
        return load()
    except (ValueError, EOFError, OSError) as error:
        raise DamagedIndex(path, f"can't be read ({' '.join(str(error).split())})") from error


def _why_damaged(path: Path, *, by_hash: bool) -> Optional[str]:
    try:
        with open_regular(path, follow=False) as file:
            if not by_hash:
                return None
            try:
                expected = read_bounded(_hash_file(path), at_most=_HASH_BYTES, follow=False).split()
            except FileNotFoundError:
                return "has no hash beside it, so nemo2 did not write it, or did not finish writing it"
            if hashlib.file_digest(file, "sha256").hexdigest().encode() not in expected[:1]:
                return "has changed since it was written (its SHA-256 differs)"
    except OSError as error:
        return f"can't be read ({error.strerror or error})"
    return None


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + _HASH)


def _is_inside(file: Any, directory: str) -> bool:
    return isinstance(file, str | os.PathLike) and os.path.abspath(file).startswith(directory)
