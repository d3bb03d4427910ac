# SPDX-License-Identifier: Apache-2.0
"""A rank's signs of life on this machine: the time of its last step, and the position in its stacks when it hangs.

`hang_diagnosis` reads them. Imports nothing heavy.
"""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple, Optional

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
FIRST_FRAME = "(most recent call first):\n"
_TORCH_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_RECORD_BYTES = 128


class Heartbeat:
    """This rank's file with the time and number of its last step. A step costs one write to an open file."""

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(Path(directory) / f"rank-{rank}.stopped")  # from an earlier attempt
        self._file = open(Path(directory) / f"rank-{rank}.heartbeat", "wb", buffering=0)  # noqa: SIM115  (open as long as the run)

    def beat(self, step: int, phase: str = "") -> None:
        """Write a heartbeat. Never raises, because a full disk is reported elsewhere. ``phase``: the activity
        outside steps, such as "in validation"."""
        record = json.dumps({"time": round(time.time(), 3), "step": step, "phase": phase}).ljust(_RECORD_BYTES)
        with contextlib.suppress(OSError):
            os.pwrite(self._file.fileno(), record.encode(), 0)

    def end(self) -> None:
        name = self._file.name
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(name)


def mark_stopped(directory: str | os.PathLike[str], rank: int) -> None:
    """Record that the process of ``rank`` was found stopped, before it is ended."""
    with contextlib.suppress(OSError):
        (Path(directory) / f"rank-{rank}.stopped").write_text("", encoding="utf-8")


class Position(NamedTuple):
    """The position of a rank: a torch collective with its caller, or only the innermost frame."""

    collective: Optional[str]
    at: str

    def __str__(self) -> str:
        return f"{self.collective}, called at {self.at}" if self.collective else f"at {self.at}"


def position_of(stacks: str) -> Position:
    """The position of the main thread, which faulthandler writes last."""
    frames = [match for line in stacks.split(FIRST_FRAME)[-1].splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return Position(collective=None, at="an unknown place")
    inside = [frame for frame in frames if os.path.basename(frame["file"]) in _TORCH_COLLECTIVES]
    if not inside:
        return Position(collective=None, at=_shown(frames[0]))
    outermost = frames.index(inside[-1])
    callers = [frame for frame in frames[outermost + 1 :] if "/torch/" not in frame["file"]]
    collective = inside[-1]["function"]
    # A rank that waits for a collective that was issued elsewhere shows only the name of the wait.
    return Position(collective=collective, at=_shown(callers[0] if callers else frames[outermost]))


def _shown(frame: Any) -> str:
    return f'File "{frame["file"]}", line {frame["line"]} in {frame["function"]}'
