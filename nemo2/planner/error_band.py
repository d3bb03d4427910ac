# SPDX-License-Identifier: Apache-2.0
"""How far a predicted speed may be off: what predictions of like jobs were off when their own project was left out."""

from collections.abc import Mapping
from typing import NamedTuple, Optional

from nemo2.models.shape import ModelShape
from nemo2.planner.constants import calibration
from nemo2.planner.job import Job

ENOUGH = 10
"""Measurements whose sixths say something."""


class Band(NamedTuple):
    """Measured over predicted speed: two thirds of similar jobs lie between `low` and `high`.

    `kind` describes the jobs, and `measurements` is their number.
    """

    low: float
    high: float
    kind: str
    measurements: int


def job_kind(shape: ModelShape, job: Job) -> str:
    """The kind of a job, which decides its error band: mixers, experts, ZeRO-3, and precision."""
    model = "hybrid" if shape.mixers else "experts" if shape.experts else "dense"
    precision = "16 bits" if job.precision in ("bf16", "fp32") else "8 bits or fewer"
    return f"{model}, {'FSDP, ' if job.sharding == 'fsdp' else ''}{precision}"


def band(shape: ModelShape, job: Job, errors: Optional[Mapping[str, list[float]]] = None) -> Band:
    """The band of a job's speed; ``errors`` (low, high, number of measurements by kind) None: those of the calibration.

    A kind that fewer than `ENOUGH` have measured gets the widest band of the kinds that so many have.
    """
    known: Mapping[str, list[float]] = calibration()["errors"] if errors is None else errors
    kind = job_kind(shape, job)
    low, high, count = known.get(kind, (1.0, 1.0, 0))
    if count < ENOUGH:
        wide = [one for one in known.values() if one[2] >= ENOUGH] or list(known.values())
        low, high = min(one[0] for one in wide), max(one[1] for one in wide)
    # The prediction itself is always within: a band that leaves it out would say to multiply it.
    return Band(min(low, 1.0), max(high, 1.0), kind, int(count))
