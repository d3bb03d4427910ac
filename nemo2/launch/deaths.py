# SPDX-License-Identifier: Apache-2.0
"""Reads from torchrun's report how ranks ended. Imports nothing heavy, because a job's script calls it on its node."""

import re
import signal
from dataclasses import dataclass
from typing import Optional

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


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a rank in torchrun's report. A negative ``code`` is a signal."""

    rank: int
    code: int


def deaths_in(text: str) -> list[Death]:
    """Torchrun's failure report, root cause first. Empty if torchrun wrote none."""
    _, found, report = text.rpartition("Root Cause (first observed failure):")
    if not found:
        return []
    deaths = [Death(rank=int(match["rank"]), code=int(match["code"])) for match in _REPORTED.finditer(report)]
    _, _, others = text.rpartition("Failures:")
    for match in _REPORTED.finditer(others):
        death = Death(rank=int(match["rank"]), code=int(match["code"]))
        if death not in deaths:
            deaths.append(death)
    return deaths


def killed_words(death: Death) -> str:
    """A clause that names the signal and its usual sender."""
    number = signal.Signals(-death.code)
    advice = f" ({_ADVICE[number]})" if number in _ADVICE else ""
    return f"rank {death.rank} was killed by {number.name}{advice}; nemo2 ended the other ranks"


def killed_by(death: Death) -> Optional[str]:
    """A sentence for a rank that the machine or an external process ended. None for any other end."""
    return f"{killed_words(death)}." if -death.code in DECISIVE_SIGNALS else None
