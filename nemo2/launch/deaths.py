# SPDX-License-Identifier: Apache-2.0
"""How ranks ended, from torchrun's report. Imports nothing heavy: a job's script asks on its node."""

import re
import signal
from dataclasses import dataclass
from typing import Optional

# A rank that ends so was ended from outside or by the machine; the others' errors follow from it. SIGTERM is missing
# because torchrun sends it to the ranks that are left, SIGABRT because a lost peer can cause it.
DECISIVE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_ADVICE = {
    signal.SIGKILL: "the usual reason is that the machine ran out of memory",
    signal.SIGSEGV: "a crash in native code; the last lines of its log may name it",
    **dict.fromkeys(
        (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT),
        "it was asked to end before its first step or after its last, when there is nothing to save",
    ),
}
_REPORTED = re.compile(r"rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Death:
    """A rank's end as torchrun reports it; a negative ``code`` is a signal."""

    rank: int
    code: int


def deaths_in(text: str) -> list[Death]:
    """Torchrun's failure report, its root cause first; empty if it wrote none."""
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
    """In a sentence without its end: which signal, and what usually sends it."""
    number = signal.Signals(-death.code)
    advice = f" ({_ADVICE[number]})" if number in _ADVICE else ""
    return f"rank {death.rank} was killed by {number.name}{advice}; the other ranks were ended"


def killed_by(death: Death) -> Optional[str]:
    """A sentence for a rank that the machine or somebody outside has ended; None for any other end."""
    return f"{killed_words(death)}." if -death.code in DECISIVE_SIGNALS else None
