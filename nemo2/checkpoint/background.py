# SPDX-License-Identifier: Apache-2.0
"""Background saves, which run beside training and end even if the processes that write them fail.

Each rank first assembles its files in memory, in torch's on-disk format. Training stalls only for this. Another process
then copies the files to the disk (`writer_process`). It is a new process for each save, started with an interpreter,
because a fork of a process with threads inherits locks that are never released. This module monitors it. A process that
dies, gives no sign of life or takes too long is killed and replaced. If the replacement fails too, this process writes
the files itself, because it still has their contents. Every rank learns of each save's end at the same step.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]

from nemo2.base import ranks
from nemo2.base.backend import get_backend
from nemo2.base.helper_signals import IGNORED_SIGNALS
from nemo2.checkpoint import writer_process

IN_FLIGHT = 2
"""The number of concurrent saves. Each holds a copy of this rank's state in memory."""
SILENCE_SECONDS = 60.0
"""A writer gives a sign of life every second. A writer that is silent for this long while it is monitored is stopped
or lost."""
_PROCESSES = 2
"""The number of processes that are tried, one after the other, before this process writes the files itself."""
_POLL_SECONDS = 0.05


class Image:
    """A file's contents in memory that can be passed to another process. The next save reuses its pages, because the
    kernel takes as long to provide new pages as to fill them."""

    _spare: "list[Image]" = []

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    @classmethod
    def take(cls) -> "Image":
        """A spare image, or else a new one."""
        return cls._spare.pop() if cls._spare else cls()

    @contextlib.contextmanager
    def filling(self) -> Iterator[Any]:
        """A stream that replaces the contents."""
        with open(os.dup(self.descriptor), "r+b") as stream:
            stream.seek(0)
            yield stream
            stream.truncate()

    def give_back(self, *, keep: int) -> None:
        """Take back this image, which is no longer needed. It is kept unless ``keep`` spare images exist."""
        if len(self._spare) < keep:
            self._spare.append(self)
        else:
            os.close(self.descriptor)


class BackgroundWrite:
    """This rank's files of one checkpoint while they are written.

    Args:
        name: The checkpoint's name, for messages.
        files: The images and the paths to write them to. The images are given back at the end.
        timeout_seconds: The timeout of each attempt. None: no timeout.
        record: The file that receives the hashes once all files are written (`writer_process.write`). "": none.

    When `poll` returns True, ``hashes`` has the SHA-256 of each file by its path, unless there is an ``error``.
    ``warnings`` lists the problems on the way.
    """

    def __init__(
        self, name: str, files: Sequence[tuple[Image, str]], timeout_seconds: Optional[float], record: str = ""
    ) -> None:
        self.name = name
        self.files = list(files)
        self.record = record
        self.timeout_seconds = timeout_seconds
        self.hashes: dict[str, str] = {}
        self.error: Optional[str] = None
        self.warnings: list[str] = []
        self._done = not self.files
        self._attempts = 0
        self._attempt: Any = None
        if not self._done:
            self._try_again()
        elif record:
            self.error = writer_process.write([], record).get("error")

    def poll(self) -> bool:
        """Whether the write has ended, successfully or not."""
        if self._done:
            return True
        answer, trouble = self._attempt.look(), None
        if answer is None:
            trouble = self._attempt.trouble(self.timeout_seconds)
        if trouble is not None:
            self._attempt.kill()
            if self._attempts > _PROCESSES:
                answer = {"error": f"it {trouble}"}
            else:
                who = "another process" if self._attempts < _PROCESSES else "this process"
                self.warnings.append(
                    f"{self.name}: on rank {ranks.rank()}, the process that writes its files in the background {trouble}; {who} "
                    "writes them now."
                )
                self._try_again()
        if answer is not None:
            self._end(answer)
        return self._done

    def kill(self) -> None:
        """Discard the write."""
        if not self._done:
            self._attempt.kill()
            self._end({"error": "it was given up"})

    def _try_again(self) -> None:
        self._attempts += 1
        if self._attempts <= _PROCESSES:
            try:
                self._attempt = _Process(self.files, self.record)
                return
            except OSError as error:  # no memory or no process available: this process needs neither
                self.warnings.append(
                    f"{self.name}: on rank {ranks.rank()}, the background process could not be started ({error})."
                )
                self._attempts = _PROCESSES + 1
        self._attempt = _Thread(self.files, self.record)

    def _end(self, answer: dict[str, Any]) -> None:
        self.hashes, self.error = answer.get("hashes", {}), answer.get("error")
        self._done = True
        for image, _ in self.files:
            image.give_back(keep=len(self.files))


class _Process:
    """An attempt by another process."""

    def __init__(self, files: Sequence[tuple[Image, str]], record: str) -> None:
        descriptors = [image.descriptor for image, _ in files]
        job = {
            "files": [[image.descriptor, path] for image, path in files],
            "record": record,
            "ignored_signals": IGNORED_SIGNALS,
            # The signal comes when the thread that started it ends.
            "dies_with_parent": threading.current_thread() is threading.main_thread(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", writer_process.__file__, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._said = b""
        self._heard = self._started = time.monotonic()

    def look(self) -> Optional[dict[str, Any]]:
        """The process's answer. None: no answer yet."""
        new = self._read()
        if new:
            self._heard = time.monotonic()
            # Only messages are observed, so at most the last second of the silence before a message counts.
            self._said += new.lstrip(b".") if not self._said else new
        if not self._said.endswith(b"}\n"):
            return None
        self._close()
        return json.loads(self._said)

    def trouble(self, timeout_seconds: Optional[float]) -> Optional[str]:
        """Why the process will not answer any more. None: it may still answer."""
        now = time.monotonic()
        code = self._process.poll()
        if code is not None and not self._read_rest():
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"{how} (most often because the machine ran out of memory)" if code == -signal.SIGKILL else how
        if now - self._heard > SILENCE_SECONDS:
            return f"has not responded for {now - self._heard:.0f} s"
        if timeout_seconds is not None and now - self._started > timeout_seconds:
            return f"did not finish within {now - self._started:.0f} s (save_timeout_seconds={timeout_seconds:g})"
        return None

    def kill(self) -> None:
        self._process.kill()
        self._close()

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        try:
            return os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return b""

    def _read_rest(self) -> bool:
        """Whether the process answered between the last look and its end. The next look finds the answer."""
        self._said += self._read().lstrip(b".")
        return self._said.endswith(b"}\n")

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel ends later
            self._process.wait(1.0)


class _Thread:
    """The last attempt, by this process."""

    def __init__(self, files: Sequence[tuple[Image, str]], record: str) -> None:
        self._answer: list[dict[str, Any]] = []
        targets = [(image.descriptor, path) for image, path in files]
        self._thread = threading.Thread(
            target=lambda: self._answer.append(writer_process.write(targets, record)), daemon=True, name="checkpoint"
        )
        self._started = time.monotonic()
        self._thread.start()

    def look(self) -> Optional[dict[str, Any]]:
        return None if self._thread.is_alive() else self._answer[0]

    def trouble(self, timeout_seconds: Optional[float]) -> Optional[str]:
        waited = time.monotonic() - self._started
        late = timeout_seconds is not None and waited > timeout_seconds
        return f"could not be written within {waited:.0f} s by this process either" if late else None

    def kill(self) -> None:
        """Stop waiting for the thread, which can't be killed."""


class Saves:
    """Unpublished background saves, oldest first. The same on every rank, as are all calls except `end`."""

    def __init__(self) -> None:
        self._saves: deque[tuple[BackgroundWrite, Callable[[], None], Callable[[], object]]] = deque()

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, write: BackgroundWrite, publish: Callable[[], None], publish_alone: Callable[[], object]) -> None:
        """Add a save that has begun.

        Args:
            write: This rank's part.
            publish: A function that every rank calls once all ranks have written.
            publish_alone: A function that publishes the save if all ranks have written it, without communication.
        """
        self._saves.append((write, publish, publish_alone))

    def make_room(self) -> None:
        """Wait until another save may begin."""
        while len(self._saves) >= IN_FLIGHT:
            self._finish_oldest(blocking=True)

    def finish(self, *, blocking: bool) -> bool:
        """Publish the saves that every rank has written, in order. Returns whether there were any.

        Raises:
            CheckpointError: on every rank, if some rank could not write.
        """
        published = False
        while self._saves and self._finish_oldest(blocking=blocking):
            published = True
        return published

    def end(self) -> None:
        """Publish the saves that all ranks have written, and discard the others, without communication."""
        while self._saves:
            write, _, publish_alone = self._saves.popleft()
            if write.poll() and write.error is None:
                publish_alone()
            else:
                write.kill()

    def _finish_oldest(self, *, blocking: bool) -> bool:
        write, publish, _ = self._saves[0]
        # Polled in short collectives, so that no rank waits in a collective for as long as a writer may take.
        while _anywhere(not write.poll(), write):
            if not blocking:
                return False
            time.sleep(_POLL_SECONDS)
        self._saves.popleft()
        publish()
        return True


def _anywhere(pending: bool, write: BackgroundWrite) -> bool:
    """Whether the save is pending on any rank. Rank 0 reports the problems of all ranks."""
    own, write.warnings = write.warnings, []
    flags = torch.tensor([pending, bool(own)], dtype=torch.int32, device=get_backend().device)
    anywhere, trouble = map(bool, ranks.largest(flags).tolist())
    if trouble:
        for words in (words for warnings in ranks.gather(own) for words in warnings):
            rank_zero_info("warning: %s", words)
    return anywhere
