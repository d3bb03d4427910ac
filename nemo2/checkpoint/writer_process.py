# SPDX-License-Identifier: Apache-2.0
"""The process that writes one rank's files of one checkpoint in the background.

It is started by path, in isolated mode, and imports only the standard library. It therefore needs tens of
milliseconds and megabytes, no torch, and nothing of its parent except the descriptors that it receives. The parent
has filled memory with the files' contents (`background`), so training can continue. ``argv[1]`` is the job as JSON:
``files``, a list of ``[descriptor, path]``, ``record`` (see `write`), ``ignored_signals`` and ``dies_with_parent``.
The process writes a dot to standard output every second and finally one line of JSON: ``hashes``, the SHA-256 of each
file by its path, or ``error``, with ``errno``. Standard input is never written to: its end means that the parent has
ended, which ends this process.
"""

import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_CHUNK_BYTES = 1 << 20
_BEAT_SECONDS = 1.0
TRANSIENT = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
"""Transient errors of network file systems, such as a restarting server or a stale handle."""
_PAUSES = (0.5, 2.0, 8.0)
_PR_SET_PDEATHSIG = 1


def copy(descriptor: int, path: str) -> str:
    """Write the contents of ``descriptor`` to a new file ``path``, and flush it to disk. Returns its SHA-256 in
    hexadecimal.

    The written bytes are hashed while they are still in the processor's cache.
    """
    digest, place, buffer = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "wb", buffering=0) as file:
        while count := os.preadv(descriptor, [buffer], place):
            place += count
            digest.update(buffer[:count])
            left = buffer[:count]
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def persistently(
    action: Callable[..., Any], *args: Any, pauses: Sequence[float] = _PAUSES, passing: Sequence[int] = TRANSIENT
) -> Any:
    """Call ``action(*args)``. After a transient error (error numbers in ``passing``), call it again after a pause."""
    for pause in (*pauses, None):
        try:
            return action(*args)
        except OSError as error:
            if pause is None or error.errno not in passing:
                raise
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def write(files: Sequence[tuple[int, str]], record: str) -> dict[str, Any]:
    """Write all files in parallel and return the outcome in the form described above. Never raises.

    Afterwards the hashes are also written to the file ``record``, which tells every rank that the files are complete.
    "": no such file.
    """
    hashes: dict[str, str] = {}
    errors: list[BaseException] = []

    def work(descriptor: int, path: str) -> None:
        try:
            hashes[path] = persistently(copy, descriptor, path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=file, daemon=True) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors and record:
        try:
            persistently(write_record, record, hashes)
        except OSError as error:
            errors.append(error)
    if not errors:
        return {"hashes": hashes}
    return {"error": " ".join(str(errors[0]).split()) or repr(errors[0]), "errno": getattr(errors[0], "errno", None)}


def write_record(path: str, hashes: dict[str, str]) -> None:
    """Write the record of files that are on the disk, with their hashes by path."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump({os.path.basename(name): digest for name, digest in hashes.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def main() -> None:
    job = json.loads(sys.argv[1])
    for number in job["ignored_signals"]:
        signal.signal(number, signal.SIG_IGN)
    if job["dies_with_parent"]:
        # The kernel kills this process when the parent dies, even if this process is stopped and can't see the
        # end of its standard input.
        with contextlib.suppress(Exception):  # no libffi, or not Linux: only the end of standard input remains
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _parent_lives()
    answer: list[dict[str, Any]] = []
    files = [(int(descriptor), str(path)) for descriptor, path in job["files"]]
    work = threading.Thread(target=lambda: answer.append(write(files, job["record"])), daemon=True)
    work.start()
    os.set_blocking(1, False)
    while work.is_alive():
        work.join(_BEAT_SECONDS if _parent_lives() else 0.0)
        with contextlib.suppress(BlockingIOError):
            os.write(1, b".")
    os.set_blocking(1, True)
    os.write(1, b"\n" + json.dumps(answer[0]).encode() + b"\n")
    os._exit(0)  # at once, because the parent waits for the first dot


def _parent_lives() -> bool:
    """Whether the parent lives. If it doesn't, this process ends."""
    readable, _, _ = select.select([0], [], [], 0.0)
    if readable:
        os._exit(1)
    return True


if __name__ == "__main__":
    main()
