# SPDX-License-Identifier: Apache-2.0
"""The bandwidth between the ranks of a group, which depends on the ranks' placement on machines."""

from nemo2.preflight.planner.constants import Constants
from nemo2.preflight.planner.job import Job


def bandwidth(job: Job, ranks: int, stride: int, c: Constants) -> float:
    """The bytes per second that each of ``ranks`` GPUs sends and receives, if consecutive members are ``stride`` ranks
    apart.

    Within one NVLink domain the rate is NVLink's. Between domains, the network adapters of all the group's members on a
    machine carry the ring together, up to NVLink's rate.
    """
    inside = job.gpu.nvlink * c.nvlink
    if ranks * stride <= job.gpu.domain:
        return inside
    members = max(1, job.gpu.domain // stride)
    return min(inside, job.adapter * c.network * min(members, ranks))


def gathered_fraction(ranks: int) -> float:
    """The fraction of a tensor that each rank receives when a ring gathers the whole tensor."""
    return (ranks - 1) / ranks


def exchange_seconds(job: Job, volume: float, ranks: int, stride: int, c: Constants, *, choices: int = 1) -> float:
    """The seconds of an all-to-all in which each of ``ranks`` GPUs sends ``volume`` bytes, an equal share to each rank.

    Bytes to other machines go through the GPU's own network adapter, and the other bytes over NVLink at the same time.
    NVLink's rate limits the sum. On a GPU without NVLink this is PCIe's rate, which the adapter shares. With several
    ``choices``, each byte goes to as many ranks, each equally likely, once per rank. Between machines it travels once to
    each machine, which forwards it over NVLink. So travel tokens that are sent once per rank.
    """
    inside = min(ranks, max(1, job.gpu.domain // stride))
    remote = volume * _reached(ranks / inside, choices) / (job.adapter * c.network)
    everything = volume * _reached(ranks, choices) / (job.gpu.nvlink * c.nvlink)
    return max(everything, remote) / c.exchange


def _reached(places: float, choices: int) -> float:
    """The expected number of distinct remote places among ``choices`` uniform draws from ``places``."""
    return (places - 1) * (1 - (1 - 1 / places) ** choices) if places > 1 else 0.0
