# SPDX-License-Identifier: Apache-2.0
"""Writing a rank's share of a checkpoint so that a writer that dies is an error, and never a wait without end.

Megatron-Core plans what goes into which file and writes each of them. How the files of one rank are written side by side
is done here: Megatron-Core 0.16 forks a process per file and waits for all of them to report, also for one that the
kernel has killed; what they report travels through a server process, whose death is noticed on one rank only. Here the
files of a rank are written by threads, of this process or, in the background, of one forked process, which leaves its
report in memory it shares with its parent. A process that ends without a report is a failed save on every rank.

Each file's SHA-256 is taken once it is written, where it was written, from the page cache.
"""

import functools
import os
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Optional

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from nemo2.checkpoint.directory import sha256

_POLL_SECONDS = 0.2
_NOT_USED = object()


class WatchedSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron-Core's ``torch_dist`` writer, whose files are written by `write_files`.

    Args:
        background: The writing happens in a forked process.
        timeout_seconds: How long a background save may take before it is given up. None: as long as it likes.

    ``hashes`` holds the SHA-256 of each file this rank wrote, by its name, once the save is done.
    """

    def __init__(
        self, *args: Any, background: bool = False, timeout_seconds: Optional[float] = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.background = background
        self.timeout_seconds = timeout_seconds
        self.report: Optional[Report] = None

    @property
    def hashes(self) -> dict[str, str]:
        return {} if self.report is None else self.report.hashes

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *rest: Any) -> Any:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *rest)
        self.report = None
        if request.async_fn is None or getattr(writer, "use_msc", False):
            return request  # nothing to write on this rank; or object storage, whose client has its own ways
        self.report = writer.results_queue = Report()
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        function = functools.partial(
            write_files,
            transforms,
            parent=os.getpid() if self.background else None,
            timeout_seconds=self.timeout_seconds,
        )
        rank, buckets, _ = request.async_fn_args
        return request._replace(async_fn=function, async_fn_args=[rank, buckets, self.report])


class Report:
    """What the writing of one rank came to, readable by the parent of the process that wrote it.

    In memory, so that a full disk can be reported. It answers Megatron-Core as the queue does that it stands in for.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("report"), "w+b") if hasattr(os, "memfd_create") else _temporary_file()
        self.hashes: dict[str, str] = {}

    def put(self, results: Any, hashes: dict[str, str]) -> None:
        pickle.dump((results, hashes), self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            # Written by our own fork, into memory that nobody else can name.
            results, self.hashes = pickle.load(self._file)
        except EOFError:
            return RuntimeError("the process that wrote this rank's files was killed, or ran out of memory or time")
        finally:
            self._file.close()
        return results


def write_files(
    transforms: list[Any],
    rank: int,
    buckets: list[Any],
    report: Report,
    *,
    parent: Optional[int] = None,
    timeout_seconds: Optional[float] = None,
) -> None:
    """Write Megatron-Core's buckets, a thread each, and report. Never raises: the other ranks wait for a verdict.

    Args:
        transforms: What Megatron-Core passes to each write.
        rank: Not used; the place is Megatron-Core's.
        buckets: ``(path, name, (bytes, tensors))``, a file each.
        report: Receives ``{index: results}`` or an exception, and the hashes.
        parent: The process that forked this one; this process ends with it. None: it wasn't forked.
        timeout_seconds: End this process after so long. Only with ``parent``.
    """
    del rank
    if parent is not None:
        _end_with(parent, timeout_seconds)
    results: dict[int, Any] = {}
    hashes: dict[str, str] = {}
    try:
        with ThreadPoolExecutor(max_workers=max(1, len(buckets))) as pool:
            for index, (written, digest) in enumerate(pool.map(functools.partial(_write, transforms), buckets)):
                results[index] = written
                hashes[buckets[index][1]] = digest
    except BaseException as error:
        report.put(RuntimeError(_in_words(error, buckets)), {})
        return
    report.put(results, hashes)


@contextmanager
def no_results_server() -> Iterator[None]:
    """Megatron-Core starts a server for a queue that `WatchedSaveStrategy` doesn't use, unless it believes it has one."""
    if getattr(filesystem_async, "_results_queue", _NOT_USED) is not None:
        yield
        return
    filesystem_async._results_queue = _NOT_USED  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if filesystem_async._results_queue is _NOT_USED:
            filesystem_async._results_queue = None


def _write(transforms: list[Any], bucket: Any) -> tuple[list[Any], str]:
    """One file: what Megatron-Core's own writer says of it, and its hash."""
    # Any: 0.16 expects the queues of multiprocessing, whose interface these have.
    answers: Any = queue.Queue()
    counts: Any = queue.Queue()
    counts.put(0)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms, local_proc_idx=0, write_bucket=bucket, results_queue=answers, count_queue=counts, use_fsync=True
    )
    _, written = answers.get_nowait()
    if isinstance(written, BaseException):
        raise written
    return written, sha256(bucket[0])


def _end_with(parent: int, timeout_seconds: Optional[float]) -> None:
    """A fork holds copies of its parent's sockets: if it outlived a killed rank, the peers of that rank would wait for it
    instead of seeing the connection close."""
    started = time.monotonic()

    def watch() -> None:
        while os.getppid() == parent and (timeout_seconds is None or time.monotonic() - started < timeout_seconds):
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_words(error: BaseException, buckets: list[Any]) -> str:
    text = " ".join(str(error).split()) or repr(error)
    if buckets:
        # Torch's archive writer turns a full disk into "unexpected pos": the free space tells.
        folder = os.statvfs(os.path.dirname(buckets[0][0]))
        text += f" ({folder.f_bavail * folder.f_frsize / 1e9:.2f} GB are free there)"
    return text


def _temporary_file() -> Any:
    return tempfile.TemporaryFile()
