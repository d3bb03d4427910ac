# SPDX-License-Identifier: Apache-2.0
"""GPUs by name and what their generation can compute. Source: NVIDIA's list of CUDA GPUs and compute capabilities."""

from typing import Optional

from nemo2.errors import ConfigError
from nemo2.names import did_you_mean

CAPABILITY: dict[str, tuple[int, int]] = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A40": (8, 6),
    "L4": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
}


def capability(name: str) -> tuple[int, int]:
    """Compute capability of a GPU by name; ``H100x1152`` is taken for its first part.

    Raises:
        ConfigError: an unknown name, with the nearest ones.
    """
    known = {gpu.lower(): value for gpu, value in CAPABILITY.items()}
    model = name.lower().partition("x")[0].strip()
    if model not in known:
        raise ConfigError(f"--gpu {name}: not a GPU that nemo2 knows{did_you_mean(name, CAPABILITY)}")
    return known[model]


def here() -> Optional[tuple[int, int]]:
    """Compute capability of this machine's first GPU; None without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
