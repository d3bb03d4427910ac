# SPDX-License-Identifier: Apache-2.0
"""Finds the first failure among the ranks, in their faults and in torchrun's report. Imports nothing heavy, because a
job's script calls it on its node."""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple, Optional

from nemo2.base.errors import EXIT_PREEMPTED, Preempted
from nemo2.training.run_dir.faults import HANG, Fault

# The machine or an external process ended a rank that ends with one of these signals, and the other ranks' errors
# follow from it. SIGTERM is not in the list because torchrun sends it to the remaining ranks, and SIGABRT is not
# because a lost peer can cause it.
DECISIVE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_ADVICE = {
    signal.SIGKILL: "most often because the machine ran out of memory",
    signal.SIGBUS: "most often because a file that it reads through memory was truncated, or /dev/shm is full",
    signal.SIGSEGV: "a crash in native code; the last lines of its log may show where",
    **dict.fromkeys(
        (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT),
        "it was asked to end before its first step or after its last step, so there was nothing to save",
    ),
}
_REPORTED = re.compile(r"rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL)


class RankExit(NamedTuple):
    """The end of a rank in torchrun's report. A negative ``code`` is a signal."""

    rank: int
    code: int


class Cause(NamedTuple):
    """The first failure among the ranks."""

    message: str
    rank: Optional[int]
    """The rank that failed first. None: unknown, or all ranks did what they were asked to do."""
    exit_code: int
    details: str = ""
    """The traceback. Empty: there is none."""


def first_failure(faults: Sequence[Fault], report: str) -> Optional[Cause]:
    """The first of these that happened: a hang, whose silent rank is killed by others; a rank killed by a signal; ranks
    that saved and stopped on request; the earliest error that a rank wrote down. None: none of them.

    Args:
        faults: The faults that the ranks wrote down, from `read_faults`.
        report: The output of torchrun.
    """
    if not faults or faults[0].kind != HANG:
        for end in rank_exits(report):
            if -end.code in DECISIVE_SIGNALS:
                return killed(end)
    if not faults:
        return None
    if preempted := next((fault for fault in faults if fault.kind == Preempted.__name__), None):
        return Cause(preempted.message, None, EXIT_PREEMPTED)
    first = faults[0]
    who = "" if first.kind == HANG else f"rank {first.rank} failed first: "
    return Cause(f"{who}{first.kind}: {first.message}", first.rank, 1, first.traceback)


def rank_exits(report: str) -> list[RankExit]:
    """The ends of ranks in torchrun's report, root cause first. Empty if torchrun wrote none."""
    _, heading, root = report.rpartition("Root Cause (first observed failure):")
    if not heading:
        return []
    matches = (*_REPORTED.finditer(root), *_REPORTED.finditer(report.rpartition("Failures:")[2]))
    return list(dict.fromkeys(RankExit(int(match["rank"]), int(match["code"])) for match in matches))


def killed(end: RankExit) -> Cause:
    """The signal that killed a rank, and its usual sender."""
    number = signal.Signals(-end.code)
    advice = f" ({_ADVICE[number]})" if number in _ADVICE else ""
    return Cause(f"rank {end.rank} was killed by {number.name}{advice}; nemo2 ended the other ranks", *end)
