# SPDX-License-Identifier: Apache-2.0
"""Follows the output of the ranks while they run: rank 0's lines, a bar on a terminal, tracebacks held back.

torchrun writes the lines of all ranks into its own two files, each marked ``[default1]:`` with the local rank. Rank 0's
lines are shown. The other ranks' lines repeat them, or are read when a run has failed.
"""

import re
import sys
from pathlib import Path
from typing import IO

from nemo2.base.place import is_terminal
from nemo2.training.run_dir.bar import TrainingBar
from nemo2.training.run_dir.progress_line import parse_line

_MARK = re.compile(r"^\[[A-Za-z_]*(?P<rank>\d+)\]:")
_TRACEBACK = "Traceback (most recent call last):"


def agent_logs(log_dir: Path, stream: str) -> list[Path]:
    """The files with the output of torchrun and its ranks. ``stream`` is "stdout" or "stderr"."""
    return sorted(Path(log_dir).glob(f"*/*/*/[0-9]*/{stream}.log"))


def without_rank(line: str) -> tuple[int | None, str]:
    """``[default1]:text`` as ``(1, "text")``. torchrun's own lines have no rank."""
    match = _MARK.match(line)
    return (None, line) if match is None else (int(match["rank"]), line[match.end() :])


class Follower:
    """Read the new complete lines of a growing file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A library's progress bar overwrites its line with carriage returns, so only its last state is kept.
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]


class RunDisplay:
    """Show a run in this process. Call `poll` while the run lasts, then `close` once."""

    def __init__(self, log_dir: Path, *, out: IO[str] | None = None, err: IO[str] | None = None) -> None:
        self._log_dir = log_dir
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._bar = TrainingBar() if is_terminal(self._out) else None
        self._followers: dict[tuple[str, Path], Follower] = {}
        self._held: list[str] = []
        self.trained = False
        """Whether a step was shown."""

    def poll(self) -> bool:
        """Show new lines. Returns whether there were any."""
        something = False
        for stream in ("stdout", "stderr"):
            for path in agent_logs(self._log_dir, stream):
                follower = self._followers.setdefault((stream, path), Follower(path))
                for line in follower.read():
                    something = True
                    rank, text = without_rank(line)
                    if rank == 0:
                        self.take(stream, text)
        return something

    def close(self, *, succeeded: bool) -> None:
        """Show the remaining lines. The exception that is raised for a failed run shows its tracebacks."""
        self.poll()
        if self._bar is not None:
            self._bar.stop()
        if succeeded:
            self._release()
        self._held = []

    def take(self, stream: str, text: str) -> None:
        """Process a line of rank 0's "stdout" or "stderr"."""
        if stream == "stderr":
            if self._held or text.startswith(_TRACEBACK):
                self._held.append(text)
            else:
                self._show(text, self._err)
            return
        progress = parse_line(text)
        if progress is not None:
            self.trained = True
            # The run continues, so the lines held back were not its end.
            self._release()
        if progress is None or self._bar is None:
            self._show(text, self._out)
            return
        if not self._bar.is_shown:
            total = None if progress.last_step is None else progress.last_step + 1
            self._bar.start(total=total, completed=progress.step)
        self._bar.update(completed=progress.step + 1, metrics=progress.metrics)

    def _release(self) -> None:
        for text in self._held:
            self._show(text, self._err)
        self._held = []

    def _show(self, text: str, target: IO[str]) -> None:
        if self._bar is not None and self._bar.is_shown:
            self._bar.print(text)
        else:
            print(text, file=target, flush=True)
