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

    What leaves the machine goes through the GPU's own adapter, the rest over NVLink at the same time. No GPU sends faster than
    NVLink's rate: where that is PCIe's, the adapter hangs on it too.
    """
    inside = min(ranks, max(1, job.gpu.domain // stride))
    everything = volume * gathered_fraction(ranks) / (job.gpu.nvlink * c.nvlink)
    remote = volume * (ranks - inside) / ranks / (job.adapter * c.network)
    return max(everything, remote) / c.exchange


def dispatch_seconds(job: Job, volume: float, choices: int, ranks: int, stride: int, c: Constants) -> float:
    """Seconds in which each of ``ranks`` GPUs sends its ``volume`` bytes of tokens to all ranks that have one of their
    ``choices`` experts, any with the same chance, and to each of them once.

    Between machines a token travels once to each machine, and is handed on over NVLink there.
    """
    inside = min(ranks, max(1, job.gpu.domain // stride))
    remote = volume * _reached(ranks / inside, choices) / (job.adapter * c.network)
    everything = volume * _reached(ranks, choices) / (job.gpu.nvlink * c.nvlink)
    return max(everything, remote) / c.exchange


def _reached(places: float, choices: int) -> float:
    """The expected number of remote places that ``choices`` uniform draws among ``places`` hit, each place counted once."""
    return (places - 1) * (1 - (1 - 1 / places) ** choices) if places > 1 else 0.0
