# SPDX-License-Identifier: Apache-2.0
"""How far a predicted speed may be off: what predictions of like jobs were off when their own source was left out."""

from collections.abc import Mapping
from typing import NamedTuple, Optional

from nemo2.planner.constants import calibration
from nemo2.planner.job import Job
from nemo2.planner.shape import ModelShape


class Band(NamedTuple):
    """Measured over predicted speed: two thirds of like jobs lie between `low` and `high`.

    `kind` says what they are like, `measurements` how many there were.
    """

    low: float
    high: float
    kind: str
    measurements: int


def kind_of(shape: ModelShape, job: Job) -> str:
    """What decides how well a job is known: experts, ZeRO-3, and precision."""
    model = "experts" if shape.experts else "hybrid" if shape.mixers else "dense"
    precision = "16 bits" if job.precision in ("bf16", "fp32") else "8 bits or fewer"
    return f"{model}, {'FSDP, ' if job.sharding == 'fsdp' else ''}{precision}"


def band(shape: ModelShape, job: Job, errors: Optional[Mapping[str, list[float]]] = None) -> Band:
    """The band of a job's speed; ``errors`` (low, high, number of measurements by kind) None: those of the calibration.

    A kind that nobody has measured gets the widest band there is.
    """
    known: Mapping[str, list[float]] = calibration()["errors"] if errors is None else errors
    kind = kind_of(shape, job)
    if kind in known:
        low, high, count = known[kind]
        return Band(low, high, kind, int(count))
    return Band(min(one[0] for one in known.values()), max(one[1] for one in known.values()), kind, 0)
