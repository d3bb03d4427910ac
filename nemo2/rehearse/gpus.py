# SPDX-License-Identifier: Apache-2.0
"""GPUs by name, and what of their memory a job can use.

Capacities are what torch reports as ``total_memory`` (in its out-of-memory messages: "GPU 0 has a total capacity of ..."), which
is less than the name says: 80 GB are 74.5 GiB by the decimal count of vendors, and 79.1 GiB on an H100 of "80 GB".
"""

import re
from dataclasses import dataclass
from typing import Any

from nemo2.errors import ConfigError
from nemo2.names import did_you_mean

GIB = 2**30

OUTSIDE_TORCH = 2 * GIB
"""CUDA context, NCCL's buffers and libraries' workspaces: 1.5 to 2.5 GB above torch's count in published runs."""
HEADROOM = 0.05
"""Share of a GPU that is left free by default: fragmentation of torch's allocator, and what is not modelled."""


@dataclass(frozen=True)
class Gpu:
    """One model of GPU; ``capacity`` in bytes."""

    name: str
    capacity: int


_CAPACITY_GIB = {
    "A100-40": 39.39,
    "A100": 79.15,
    "A800": 79.15,
    "H800": 79.10,
    "H100": 79.10,
    "H200": 139.72,
    "H20": 95.00,
    "B200": 178.35,
    "GB200": 184.00,
    "B300": 267.69,
    "GB300": 276.60,
    "L40S": 44.40,
    "RTX4090": 23.52,
    "V100-16": 15.77,
    "V100": 31.73,
}
_ALSO = {
    "V100-16GB": "V100-16",
    "V100-32": "V100",
    "V100-32GB": "V100",
    "A100-80": "A100",
    "A100-80GB": "A100",
    "A100-40GB": "A100-40",
    "H100-80": "H100",
    "H100-80GB": "H100",
}
DEFAULT = "H100"


def parse_gpus(text: str) -> tuple[Gpu, int | None]:
    """``"H100x1152"`` as the GPU and the number; ``"H100"`` leaves the number to the recipe (None).

    Raises:
        ConfigError: an unknown GPU, or a number that is none.
    """
    name, number = text.strip().upper(), None
    # As a whole first: "RTX4090" is a name, and not 4,090 of "RT".
    if _ALSO.get(name, name) not in _CAPACITY_GIB and (match := re.fullmatch(r"([A-Z0-9-]+?)[X*](\d+)", name)):
        name, number = match[1], int(match[2])
    name = _ALSO.get(name, name)
    if name not in _CAPACITY_GIB or number == 0:
        raise ConfigError(
            f"--gpus {text!r}: must be one of {', '.join(_CAPACITY_GIB)}, with a number such as H100x1152"
            f"{did_you_mean(name, list(_CAPACITY_GIB))}"
        )
    return Gpu(name, round(_CAPACITY_GIB[name] * GIB)), number


GPUS_PER_NODE = 8


def spread_over(trainer: Any, number: int) -> None:
    """Set the nodes and devices of a trainer to so many GPUs: nodes of 8, or of its devices where those divide the number.

    Raises:
        ConfigError: they are no whole nodes.
    """
    per_node = trainer.devices if isinstance(trainer.devices, int) else GPUS_PER_NODE
    if number % per_node:
        per_node = number if number < GPUS_PER_NODE else GPUS_PER_NODE
    if number % per_node:
        raise ConfigError(f"--gpus: {number} GPUs are not whole nodes of {per_node}; use a multiple of {per_node}.")
    trainer.num_nodes, trainer.devices = number // per_node, per_node
