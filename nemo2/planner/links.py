# SPDX-License-Identifier: Apache-2.0
"""How fast the ranks of a group exchange bytes, by where in the machines they sit."""

from nemo2.planner.constants import Constants
from nemo2.planner.job import Job


def bandwidth(job: Job, ranks: int, stride: int, c: Constants) -> float:
    """Bytes per second that each of ``ranks`` GPUs sends and receives when they stand ``stride`` apart.

    Within one NVLink domain it is NVLink's rate. Beyond it, every adapter of a machine that belongs to a member of the
    group carries a share of the ring, up to NVLink's rate inside.
    """
    inside = job.gpu.nvlink * c.nvlink
    if ranks * stride <= job.gpu.domain:
        return inside
    members = max(1, job.gpu.domain // stride)
    return min(inside, job.adapter * c.network * min(members, ranks))


def gathered_fraction(ranks: int) -> float:
    """The share of a tensor that a rank of a ring receives to have all of it."""
    return (ranks - 1) / ranks


def exchange_seconds(job: Job, volume: float, ranks: int, stride: int, c: Constants) -> float:
    """Seconds of an all-to-all in which each of ``ranks`` GPUs sends ``volume`` bytes, an equal share to every one.

    What leaves the machine goes through the GPU's own adapter, the rest over NVLink at the same time.
    """
    inside = min(ranks, max(1, job.gpu.domain // stride))
    local = volume * (inside - 1) / ranks / (job.gpu.nvlink * c.nvlink)
    remote = volume * (ranks - inside) / ranks / (job.adapter * c.network)
    return max(local, remote)
