# SPDX-License-Identifier: Apache-2.0
"""The facts of a stalled run: which rank stopped reporting and when, and what the other ranks waited for.

A rank of a launched run writes a heartbeat after each step, and its stacks when `HangWatchdog` ends it. Both are in
the launcher's folder on this machine. Imports nothing heavy.
"""

import contextlib
import json
import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Optional

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_FIRST_FRAME = "(most recent call first):\n"
_TORCH_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_RECORD_BYTES = 128
MISMATCH_ADVICE = "Set TORCH_DISTRIBUTED_DEBUG=DETAIL to see the collective and the tensor shapes of each rank."


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
    frames = [match for line in stacks.split(_FIRST_FRAME)[-1].splitlines() if (match := _FRAME.match(line))]
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


class Stacks(NamedTuple):
    """What a rank wrote when its watchdog ended it. ``time`` is in seconds since the epoch."""

    text: str
    time: float


def read_stacks(directory: Path) -> dict[int, Stacks]:
    """The stacks by rank. A rank that runs, or that was killed, has a file with only its limit, which isn't here."""
    stacks = {}
    for path in sorted(directory.glob("rank-*.stacks")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if _FIRST_FRAME in text:
            stacks[_rank(path)] = Stacks(text, path.stat().st_mtime)
    return stacks


def describe(directory: Path) -> Optional[tuple[int, float, str]]:
    """The rank to blame, the time of the first stacks in seconds since the epoch, and a description. None: no rank
    left stacks."""
    stacks = read_stacks(directory)
    if not stacks:
        return None
    first = min(stacks, key=lambda rank: stacks[rank].time)
    ended = stacks[first].time
    limit = stacks[first].text.partition("(")[2].partition(")")[0]
    positions = {rank: position_of(written.text) for rank, written in stacks.items()}
    heartbeats = {rank: heartbeat for rank, heartbeat in _heartbeats(directory).items() if rank not in stacks}
    if not heartbeats:
        words = f"no step ended within {limit} (h:mm:ss). Last positions: {_listed(positions)}"
        collectives = {str(position) for position in positions.values() if position.collective}
        if len(collectives) > 1:
            words += f". The ranks wait in different collectives. {MISMATCH_ADVICE}"
        return first, ended, words
    silent = min(heartbeats)
    silences = [
        _silence(rank, heartbeat, ended, (directory / f"rank-{rank}.stopped").exists())
        for rank, heartbeat in heartbeats.items()
    ]
    words = f"{'; '.join(silences)}. No step ended within {limit} (h:mm:ss). Ranks that waited: {_listed(positions)}"
    return silent, ended, words


def _silence(rank: int, heartbeat: dict[str, Any], ended: float, stopped: bool) -> str:
    since = datetime.fromtimestamp(heartbeat["time"]).strftime("%H:%M:%S")
    why = ", and its process was stopped (SIGSTOP or a debugger)" if stopped else ""
    phase = f", {heartbeat['phase']}" if heartbeat.get("phase") else ""
    return (
        f"rank {rank} stopped reporting at {since}, {ended - heartbeat['time']:.0f} s before the timeout, after step "
        f"{heartbeat['step']}{phase}{why}"
    )


def _listed(positions: dict[int, Position]) -> str:
    """Ranks by position: ``ranks 0, 2 in all_reduce, called at ...; rank 1 at ...``."""
    by_position: dict[str, list[int]] = {}
    for rank, position in positions.items():
        by_position.setdefault(f"{'in ' if position.collective else ''}{position}", []).append(rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {where}"
        for where, ranks in by_position.items()
    )


def _heartbeats(directory: Path) -> dict[int, dict[str, Any]]:
    heartbeats = {}
    for path in sorted(directory.glob("rank-*.heartbeat")):
        with contextlib.suppress(OSError, ValueError):
            heartbeats[_rank(path)] = json.loads(path.read_text(encoding="utf-8"))
    return heartbeats


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _shown(frame: Any) -> str:
    return f'File "{frame["file"]}", line {frame["line"]} in {frame["function"]}'
