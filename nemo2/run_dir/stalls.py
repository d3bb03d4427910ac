# SPDX-License-Identifier: Apache-2.0
"""The facts of a stalled run: which rank stopped reporting and when, and what the other ranks waited for.

A rank of a launched run writes a sign of life after each step, and its stacks when `HangWatchdog` ends it. Both are in
the launcher's folder on this machine. Imports nothing heavy.
"""

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_TORCH_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_RECORD_BYTES = 128
MISMATCH_ADVICE = "Set TORCH_DISTRIBUTED_DEBUG=DETAIL to see the collective and the tensor shapes of each rank."


class LifeSign:
    """This rank's file with the time and number of its last step. A step costs one write to an open file."""

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(Path(directory) / f"rank-{rank}.stopped")  # from an earlier attempt
        self._file = open(Path(directory) / f"rank-{rank}.life", "wb", buffering=0)  # noqa: SIM115  (open as long as the run)

    def give(self, step: int, phase: str = "") -> None:
        """Write a sign of life. Never raises, because a full disk is reported elsewhere. ``phase``: the activity
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


@dataclass(frozen=True, kw_only=True)
class Spot:
    """The place of a rank: a torch collective with its caller, or only the innermost frame."""

    collective: Optional[str]
    at: str

    def __str__(self) -> str:
        return f"{self.collective}, called at {self.at}" if self.collective else f"at {self.at}"


def place_of(stacks: str) -> Spot:
    """The place of the main thread, which faulthandler writes last."""
    frames = [
        match for line in stacks.split("(most recent call first):\n")[-1].splitlines() if (match := _FRAME.match(line))
    ]
    if not frames:
        return Spot(collective=None, at="an unknown place")
    inside = [frame for frame in frames if os.path.basename(frame["file"]) in _TORCH_COLLECTIVES]
    if not inside:
        return Spot(collective=None, at=_shown(frames[0]))
    outermost = frames.index(inside[-1])
    callers = [frame for frame in frames[outermost + 1 :] if "/torch/" not in frame["file"]]
    collective = inside[-1]["function"]
    # A rank that waits for a collective that was issued elsewhere shows only the name of the wait.
    return Spot(collective=collective, at=_shown(callers[0] if callers else frames[outermost]))


def describe(directory: Path) -> Optional[tuple[int, float, str]]:
    """The rank to blame, the time of the first stacks in seconds since the epoch, and a description. None: no rank
    left stacks."""
    stacks = {_rank(path): path for path in sorted(directory.glob("rank-*.stacks")) if path.stat().st_size}
    if not stacks:
        return None
    texts = {rank: path.read_text(encoding="utf-8", errors="replace") for rank, path in stacks.items()}
    first = min(stacks, key=lambda rank: stacks[rank].stat().st_mtime)
    ended = stacks[first].stat().st_mtime
    limit = texts[first].partition("(")[2].partition(")")[0]
    places = {rank: place_of(text) for rank, text in texts.items()}
    lives = {rank: life for rank, life in _lives(directory).items() if rank not in stacks}
    if not lives:
        words = f"no step ended within {limit} (h:mm:ss). Last positions: {_listed(places)}"
        collectives = {str(place) for place in places.values() if place.collective}
        if len(collectives) > 1:
            words += f". The ranks wait in different collectives. {MISMATCH_ADVICE}"
        return first, ended, words
    silent = min(lives)
    told = [_silence(rank, life, ended, (directory / f"rank-{rank}.stopped").exists()) for rank, life in lives.items()]
    words = f"{'; '.join(told)}. No step ended within {limit} (h:mm:ss). Ranks that waited: {_listed(places)}"
    return silent, ended, words


def _silence(rank: int, life: dict[str, Any], ended: float, stopped: bool) -> str:
    since = datetime.fromtimestamp(life["time"]).strftime("%H:%M:%S")
    why = ", and its process was stopped (SIGSTOP or a debugger)" if stopped else ""
    phase = f", {life['phase']}" if life.get("phase") else ""
    return (
        f"rank {rank} stopped reporting at {since}, {ended - life['time']:.0f} s before the timeout, after step "
        f"{life['step']}{phase}{why}"
    )


def _listed(places: dict[int, Spot]) -> str:
    """Ranks by place: ``ranks 0, 2 in all_reduce, called at ...; rank 1 at ...``."""
    by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_place.setdefault(f"{'in ' if place.collective else ''}{place}", []).append(rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {where}"
        for where, ranks in by_place.items()
    )


def _lives(directory: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sorted(directory.glob("rank-*.life")):
        with contextlib.suppress(OSError, ValueError):
            found[_rank(path)] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _shown(frame: Any) -> str:
    return f'File "{frame["file"]}", line {frame["line"]} in {frame["function"]}'
