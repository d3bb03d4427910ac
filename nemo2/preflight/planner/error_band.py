# SPDX-License-Identifier: Apache-2.0
"""The error band of a predicted speed: the errors of predictions for similar jobs, each calibrated without the job's own
project."""

from collections.abc import Mapping
from typing import NamedTuple, Optional

from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.constants import calibration
from nemo2.preflight.planner.job import Job

ENOUGH = 10
"""The fewest measurements of one kind of job that give a band."""


class Band(NamedTuple):
    """The range of measured over predicted speed.

    Two thirds of the measured jobs of the same `kind` lie between `low` and `high`. `measurements` is the number of
    these jobs. With fewer than `ENOUGH` jobs the band is the widest band of the kinds that have enough.
    """

    low: float
    high: float
    kind: str
    measurements: int

    @property
    def borrowed(self) -> bool:
        """Whether the band is the widest band of other kinds, because this kind has too few measurements."""
        return self.measurements < ENOUGH


def job_kind(shape: ModelShape, job: Job) -> str:
    """The kind of a job, which decides its error band: mixers, experts, ZeRO-3, and precision."""
    model = "hybrid" if shape.is_hybrid else "experts" if shape.experts else "dense"
    precision = "16 bits" if job.precision in ("bf16", "fp32") else "8 bits or fewer"
    return f"{model}, {'FSDP, ' if job.sharding == 'fsdp' else ''}{precision}"


def band(shape: ModelShape, job: Job, errors: Optional[Mapping[str, list[float]]] = None) -> Band:
    """The band of a job's speed.

    Args:
        errors: For each kind of job the low end, the high end and the number of measurements. None: the calibration's.
    """
    bands: Mapping[str, list[float]] = calibration()["errors"] if errors is None else errors
    kind = job_kind(shape, job)
    low, high, count = bands.get(kind, (1.0, 1.0, 0))
    if count < ENOUGH:
        wide = [one for one in bands.values() if one[2] >= ENOUGH] or list(bands.values())
        low, high = min(one[0] for one in wide), max(one[1] for one in wide)
    # The band always contains the prediction. A band without it would be a correction of the prediction.
    return Band(min(low, 1.0), max(high, 1.0), kind, int(count))
