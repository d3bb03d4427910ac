# SPDX-License-Identifier: Apache-2.0
"""Files in folders that another user may have filled: only regular files of a limited size are read, and nothing is
written through a link.

A name from a file (a manifest's, ``.metadata``'s) must be a path inside its folder, or it is rejected.
"""

import fcntl
import glob
import hashlib
import itertools
import json
import logging
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError, DataError, OutputExists, RuntimeFault

_log = logging.getLogger(__name__)
MIB = 1 << 20
_SAMPLE_BYTES, _SAMPLES = 4096, 64


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text in which no object has two values for one name. Readers differ in which value they use,
    so a check could see another value than the reader. A name may be repeated with the same value.

    ``NaN`` and ``Infinity``, which Python's writer uses for numbers that aren't finite, are read as such.

    Raises:
        ValueError: it is no JSON, or a name has two values.
        RecursionError: it is too deep.
    """
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    for name, value in pairs:
        # As text, because NaN differs from itself, and 1 equals True.
        if json.dumps(value, sort_keys=True) != json.dumps(values[name], sort_keys=True):
            raise ValueError(f"the name {name!r} stands for two values in one object")
    return values


class UnusableFile(OSError):
    """Its text is the clause after the file's name: "is a link to ...". Callers explain the consequence to the user."""


def read_bounded(path: Path | str, *, at_most: int, follow: bool = True) -> bytes:
    """The contents of a regular file.

    Args:
        path: Where it is.
        at_most: Bytes; looked at before anything is read.
        follow: Whether a link in the last place is followed.

    Raises:
        UnusableFile: it is a pipe, device, folder or (unless followed) a link, or larger than that.
        OSError: it isn't there or can't be read.
    """
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise UnusableFile(f"has {size} bytes, and at most {at_most} are read")
        return file.read(at_most + 1)


def open_regular(path: Path | str, *, follow: bool = True) -> Any:
    """A regular file, opened for reading in binary without waiting for anybody. Raises as `read_bounded`."""
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    extra = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra))  # noqa: SIM115
    except OSError as error:
        if not follow and os.path.islink(path):
            raise UnusableFile(f"is a link to {os.readlink(path)}") from error
        if isinstance(error, IsADirectoryError):
            raise UnusableFile("is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnusableFile("is no regular file")
    return file


def text_of(file: Path | int) -> str:
    """The text of a file. 0: standard input, which isn't opened anew: a socket (ssh) can't be.

    Raises:
        DataError: the file can't be read, isn't UTF-8 text, or is empty.
    """
    name = "standard input" if file == 0 else file
    try:
        with open(file, encoding="utf-8", closefd=file != 0) as opened:
            text = opened.read()
    except OSError as error:
        raise DataError(f"{name} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name} isn't UTF-8 text: {error}.") from None
    if not text:
        raise DataError(f"{name} is empty.")
    return text


def sha256(path: Path | str, *, report: Optional[Callable[[int], None]] = None) -> str:
    """The SHA-256 of a file, in hexadecimal. ``report`` is called with the bytes done, after each block."""
    # A small buffer is reused, so that the hashed data are still in the processor's cache.
    digest, buffer, done = hashlib.sha256(), memoryview(bytearray(MIB // 4)), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if report is not None:
                report(done)
    return digest.hexdigest()


def update_with_samples(digest: Any, path: Path | str) -> None:
    """Update a hash with 64 evenly spaced blocks of 4 KiB of a large file, including the first and the last."""
    last = max(0, os.stat(path).st_size - _SAMPLE_BYTES)
    with open(path, "rb") as file:
        for place in sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)}):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))


def why_not_inside(folder: Path, name: Any, *, links_into: Optional[Path] = None) -> Optional[str]:
    """Why ``name`` is no path of a file inside ``folder``, as a clause; None if it is one, there or not.

    An absolute path, one that climbs, and one through a link lead out of the folder. Links to files of the folder
    ``links_into`` are allowed. None: no links.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        return "is no path"
    parts = PurePosixPath(name).parts
    if parts[0] == "/" or ".." in parts:
        return "leads out of its folder"
    path = folder
    for part in parts:
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return None  # what isn't there leads nowhere
        if stat.S_ISLNK(mode):
            if links_into is None or path.resolve().parent != links_into:
                return f"is a link to {os.readlink(path)}"
            mode = os.stat(path).st_mode if path.exists() else stat.S_IFREG
    return None if stat.S_ISREG(mode) else "is no regular file"


def open_to_write(path: Path | str, flags: int = 0) -> int:
    """A descriptor of the regular file ``path``, which is created if it doesn't exist. Its contents stay unless
    ``flags`` say otherwise.

    For `open` as its ``opener``.

    Raises:
        UnusableFile: ``path`` is a link, pipe, device or folder.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= 0 if flags & (os.O_WRONLY | os.O_RDWR) else os.O_WRONLY
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise UnusableFile(f"is a link to {os.readlink(path)}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableFile("is no regular file")
    return descriptor


def refuse_existing(*paths: Path | str, overwrite: Optional[bool] = None) -> None:
    """Refuse to write where files or folders exist. Devices and pipes keep nothing that could be lost.

    Commands replace without ``--overwrite`` only what they can make again from what is there: reports, traces and HTML pages.
    Functions under NeMo 2.0's names that have no ``overwrite`` replace their file, as NeMo's do.

    Args:
        paths: The files and folders to write.
        overwrite: What the user has set; True replaces them. None: the caller never replaces them.

    Raises:
        OutputExists: some of them exist, and ``overwrite`` isn't True.
    """
    named = [Path(path).expanduser() for path in paths]
    existing = [] if overwrite else [str(path) for path in named if path.is_file() or path.is_dir()]
    if existing:
        fix = "delete what is there" if overwrite is None else advice("--overwrite", "overwrite=True")
        raise OutputExists(
            f"{' and '.join(existing)} exist{'' if len(existing) > 1 else 's'}: use another name, or {fix}."
        )


def output_file(path: Path | str) -> Path:
    """The path of a file to write, which may exist already, in a folder that may not.

    Raises:
        ConfigError: no file can be written there.
        RuntimeFault: the disk is full.
    """
    target = Path(path).expanduser()
    if target.is_dir() or str(path).endswith("/"):
        raise ConfigError(f"{path} is a directory: add the name of the file to write.")
    return _writable(target)


def output_folder(path: Path | str) -> Path:
    """The path of a folder to write, like `output_file`. It is written beside its place and renamed.

    Raises:
        ConfigError: no folder can be written there.
        RuntimeFault: the disk is full.
    """
    target = Path(path).expanduser()
    if target.is_symlink() and not target.exists():
        raise ConfigError(f"{path} is a link to {os.readlink(target)}, which doesn't exist. Use another path.")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{path} is a file: name a directory to write.")
    if target.exists():
        _writable(target.absolute().parent)
    return _writable(target)


def _writable(target: Path) -> Path:
    place = target.resolve() if target.is_file() else target.absolute()
    above = next((parent for parent in place.parents if parent.exists()), target)
    if not above.is_dir():
        raise ConfigError(f"{target}: {above} is a file, not a directory. Use another path.")
    # A file is replaced by another in its folder; a device or pipe is written to.
    replaced = target if target.exists() and not target.is_file() else above
    if not all(os.access(path, os.W_OK) for path in (replaced, target) if path.exists()):
        raise ConfigError(f"{target}: this user has no permission to write it. Use another path.")
    disk = os.statvfs(replaced)
    # Of no blocks, nothing is known. Root may use the free blocks that others have not available.
    if replaced is above and disk.f_blocks and not disk.f_bfree:
        raise RuntimeFault(f"{target}: this disk is full. Free space on it, or use another path.")
    return target


def replaceable_file(path: Path | str) -> Path:
    """`output_file` of a file that gets its name once it is complete. A link is followed.

    Raises:
        ConfigError: see `output_file`; or a device or pipe has this name, which the new file would take from it.
    """
    target = output_file(path)
    if target.exists() and not target.is_file():
        raise ConfigError(f"{path} is a device or pipe, which a file can't replace: use the path of a file.")
    return target.resolve()


@contextmanager
def replacing(path: Path | str, *, by_user: bool = True, mode: int = 0o666) -> Iterator[Path]:
    """The path of a temporary file beside ``path``, which gets its name when the block ends. After an error, ``path`` is
    what it was. What a killed process left of the same file is deleted.

    Args:
        by_user: The user named ``path``: a link is followed, and folders are created. Otherwise a link is replaced.
        mode: The permissions of the new file, before the umask.

    Raises:
        ConfigError: the user named a path that can't be written, see `replaceable_file`.
        RuntimeFault: the system refuses it, as a full disk does. Without ``by_user`` it is an OSError.
    """
    target = replaceable_file(path) if by_user else Path(path)
    if by_user:
        target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.[0-9]*-????????.tmp"):
        with suppress(OSError), locked(left) as dead:
            if dead:
                left.unlink()
    temporary = temporary_beside(target)
    try:
        with ExitStack() as lock:
            with suppress(OSError):  # writing tells the user
                lock.enter_context(locked(temporary, create=mode))
            yield temporary
            os.replace(temporary, target)
    except OSError as error:
        if not by_user:
            raise
        raise RuntimeFault(
            f"{path} can't be written: {error.strerror or error}. What was there is unchanged."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A new name beside ``path`` for what is written in its place."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def locked(path: Path | str, *, create: Optional[int] = None) -> Iterator[bool]:
    """Lock a file or folder, until this process ends at the latest. False: another process holds the lock, or the file system
    has none. ``create``: the permissions of a file that is created if it doesn't exist."""
    flags = os.O_RDONLY | os.O_DIRECTORY if os.path.isdir(path) else os.O_RDWR | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, create or 0)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes that this one has forked have the descriptor too
    finally:
        os.close(descriptor)


def append(path: Path | str, text: str, *, opener: Optional[Callable[[str, int], int]] = open_to_write) -> None:
    """Append to a file, which is created if it doesn't exist, all of ``text``. After an error, as of a full disk, the file is
    what it was: half a line would spoil the next one. ``opener``: that of `open`."""
    data = text.encode()
    with open(path, "ab", buffering=0, opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def write_file(path: Path | str, text: str, *, new: bool = False) -> Path:
    """Write a file and its folders. A file that exists is replaced once the new one is complete; with ``new``, it is an error.

    Raises:
        ConfigError: see `output_file`; or the file exists (`OutputExists`).
        RuntimeFault: the system refuses it, as a full disk does.
    """
    target = output_file(path)
    if new:
        refuse_existing(target)
    if target.exists() and not target.is_file():  # /dev/stdout
        target.write_text(text, encoding="utf-8")
        return target
    with replacing(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return target


@contextmanager
def recording_to(path: Path, *, owner: str) -> Iterator[None]:
    """Write ``path`` in the block. A file of an earlier run or start is renamed (``rank-0.1.json``), so that none is replaced.
    A failure causes a warning: it must not end the run before its next checkpoint."""
    try:
        if path.exists():
            names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
            kept = path.rename(next(name for name in names if not name.exists()))
            _log.warning("%s is of an earlier run or start, and is now %s.", path, kept.name)
        try:
            yield
            path.stat()  # torch's profiler reports no failure
        except OSError:
            path.unlink(missing_ok=True)  # a part of a file can't be read
            raise
    except OSError as error:
        _log.warning("%s: %s was not written (%s). Check the space on its disk.", owner, path, error.strerror or error)
