# SPDX-License-Identifier: Apache-2.0
"""Writes large files in one pass from parts of other files, in bounded memory.

A file is an ordered list of stretches. Most stretches are bytes of another file. Computed bytes arrive block by block.
Several files are written in parallel, each by a thread, which can also compute the file's SHA-256.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

import torch
from torch import Tensor

from nemo2.base.errors import CheckpointError

_Item = TypeVar("_Item")
BLOCK = 8 << 20
"""The number of bytes that are read and written at a time."""
_THREADS = 4
_NO_COPIES = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of file systems between which the kernel can't copy."""


@dataclass(frozen=True)
class Copy:
    """``length`` bytes of ``file`` from ``place`` on."""

    file: str
    place: int
    length: int


@dataclass(frozen=True)
class There:
    """Bytes that the file already has."""

    length: int


@dataclass(frozen=True)
class Computed:
    """The bytes of the tensors that ``blocks`` yields in order."""

    length: int
    blocks: Callable[[], Iterator[Tensor]]


Stretch = Union[bytes, Copy, There, Computed]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A file to write."""

    path: Path
    stretches: Sequence[Stretch]


def write_files(
    files: Sequence[Planned], *, advance: Callable[[int], None], hashes: bool = False, threads: int = _THREADS
) -> dict[Path, str]:
    """Write all files. Returns their SHA-256 if ``hashes`` is set.

    Args:
        advance: Called with the number of bytes written since the last call.

    Raises:
        OSError: the error of the first thread that failed. The other threads stop.
        EOFError: as for OSError.
    """
    stop = threading.Event()

    def write(file: Planned) -> tuple[Path, str]:
        try:
            return file.path, _write(file, hashes, advance, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(min(threads, max(1, len(files)))) as pool:
        pending = [pool.submit(write, file) for file in files]
        try:
            written = [one.result() for one in pending]
        except BaseException:
            stop.set()
            for future in pending:
                future.cancel()
            failed = (error for one in pending if not one.cancelled() and (error := one.exception()) is not None)
            raise next((error for error in failed if not isinstance(error, _Stopped)), _Stopped()) from None
    return dict(written) if hashes else {}


class _Stopped(Exception):
    """Another thread has failed."""


def _write(file: Planned, hashes: bool, advance: Callable[[int], None], stop: threading.Event) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK))
    with open(file.path, "r+b" if file.path.exists() else "w+b", buffering=0) as target:
        place = 0
        for stretch in file.stretches:
            if isinstance(stretch, Copy) and not hashes:
                for count in _copied(stretch, target.fileno(), place):
                    if stop.is_set():
                        raise _Stopped
                    advance(count)
                    place += count
                continue
            for block, there in _blocks(stretch, target, place, buffer):
                if stop.is_set():
                    raise _Stopped
                if hashes:
                    digest.update(block)
                if not there:
                    _write_all(target.fileno(), block, place)
                    advance(len(block))
                place += len(block)
        target.truncate(place)
    return digest.hexdigest()


def _copied(stretch: Copy, target: int, place: int) -> Iterator[int]:
    """Let the kernel copy a stretch without passing its bytes through this process. Yields the number of bytes of each
    copy."""
    with open(stretch.file, "rb", buffering=0) as source:
        done = 0
        while done < stretch.length and hasattr(os, "copy_file_range"):  # not on macOS
            try:
                count = os.copy_file_range(
                    source.fileno(), target, min(BLOCK, stretch.length - done), stretch.place + done, place + done
                )
            except OSError as error:
                if error.errno not in _NO_COPIES:
                    raise
                break
            if count == 0:
                raise EOFError(
                    f"{stretch.file} ends at byte {stretch.place + done}, and {stretch.length - done} more are needed"
                )
            done += count
            yield count
        buffer = memoryview(bytearray(BLOCK)) if done < stretch.length else memoryview(b"")
        for block in _read(source.fileno(), stretch.file, stretch.place + done, stretch.length - done, buffer):
            _write_all(target, block, place + done)
            done += len(block)
            yield len(block)


def _blocks(stretch: Stretch, target: Any, place: int, buffer: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """The bytes of a stretch, and whether the file already has them."""
    if isinstance(stretch, bytes):
        yield memoryview(stretch), False
    elif isinstance(stretch, Copy):
        with open(stretch.file, "rb", buffering=0) as source:
            for block in _read(source.fileno(), stretch.file, stretch.place, stretch.length, buffer):
                yield block, False
    elif isinstance(stretch, There):
        for block in _read(target.fileno(), target.name, place, stretch.length, buffer):
            yield block, True
    else:
        for tensor in stretch.blocks():
            array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            yield memoryview(array), False


def _read(descriptor: int, name: Any, place: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
    while length:
        count = os.preadv(descriptor, [buffer[: min(length, BLOCK)]], place)
        if count == 0:
            raise EOFError(f"{name} ends at byte {place}, and {length} more are needed")
        yield buffer[:count]
        place, length = place + count, length - count


def _write_all(descriptor: int, block: memoryview, place: int) -> None:
    while block:
        count = os.pwrite(descriptor, block, place)
        block, place = block[count:], place + count


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The stretches, with adjacent copies merged."""
    result: list[Stretch] = []
    for stretch in stretches:
        last = result[-1] if result else None
        end = (last.file, last.place + last.length) if isinstance(last, Copy) else None
        if isinstance(stretch, Copy) and isinstance(last, Copy) and (stretch.file, stretch.place) == end:
            result[-1] = Copy(last.file, last.place, last.length + stretch.length)
        else:
            result.append(stretch)
    return result


def grouped(items: Iterable[_Item], size: Callable[[_Item], int], *, most: int) -> Iterator[list[_Item]]:
    """The items in order, in groups of at most ``most`` bytes. A larger item has a group of its own; without items there
    is one empty group."""
    group: list[_Item] = []
    filled = 0
    for item in items:
        if group and filled + size(item) > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size(item)
    yield group


@contextmanager
def progress_bar(text: str, total: int, *, show: Optional[bool]) -> Iterator[Callable[[int], None]]:
    """A bar with the bytes done, the speed and the remaining time. Yields the function to call with each number of
    bytes.

    Args:
        show: None: show the bar if standard error is a terminal.
    """
    import sys

    if not (sys.stderr.isatty() if show is None else show):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column

    # One line of 80 columns: of a long name, such as a checkpoint's, the end is left out.
    shortened, whole = Column(ratio=1, no_wrap=True, overflow="ellipsis"), Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=shortened),
        BarColumn(bar_width=16),
        DownloadColumn(table_column=whole),
        TransferSpeedColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
    )
    with Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda count: bar.advance(task, count)


def refuse_full_disk(target: Path, needed: int) -> None:
    """Check that ``needed`` bytes fit on the disk of ``target``.

    Raises:
        CheckpointError: they don't.
    """
    folder = os.statvfs(target.parent)
    if needed > (free := folder.f_bavail * folder.f_frsize):
        raise CheckpointError(
            f"{target} would have {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there. Free some, or write elsewhere."
        )
