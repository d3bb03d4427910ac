# SPDX-License-Identifier: Apache-2.0
"""Rehearses a job for any number of GPUs in one process on a laptop, with the code that the job will run."""

from typing import TYPE_CHECKING, Any

from nemo2.rehearse.counts import (
    CollectiveCount,
    Event,
    FlopCount,
    MemoryCount,
    RankRehearsal,
    Rehearsal,
    Verdict,
)

if TYPE_CHECKING:
    from nemo2.rehearse.job import rehearse as rehearse

__all__ = ["CollectiveCount", "Event", "FlopCount", "MemoryCount", "RankRehearsal", "Rehearsal", "Verdict", "rehearse"]


def __getattr__(name: str) -> Any:
    # The counts are plain data, but rehearsing needs torch.
    if name == "rehearse":
        from nemo2.rehearse.job import rehearse

        return rehearse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
