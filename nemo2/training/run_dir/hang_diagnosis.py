# SPDX-License-Identifier: Apache-2.0
"""The facts of a stalled run: which rank stopped reporting and when, and what the other ranks waited for.

A rank of a launched run writes a heartbeat after each step, and its stacks when `HangWatchdog` ends it. Both are in
the launcher's folder on this machine. Imports nothing heavy.
"""

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Optional

from nemo2.training.run_dir.heartbeat import FIRST_FRAME, Position, position_of

MISMATCH_ADVICE = "Set TORCH_DISTRIBUTED_DEBUG=DETAIL to see the collective and the tensor shapes of each rank."


class Stacks(NamedTuple):
    """What a rank wrote when its watchdog ended it. ``time`` is in seconds since the epoch."""

    text: str
    time: float


def read_stacks(directory: Path) -> dict[int, Stacks]:
    """The stacks by rank. A rank that runs, or that was killed, has a file with only its limit, which isn't here."""
    stacks = {}
    for path in sorted(directory.glob("rank-*.stacks")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if FIRST_FRAME in text:
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
