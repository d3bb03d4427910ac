# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: the features of their generation, the memory that a job can use, and their data-sheet rates.

`nemo2.preflight.planner.constants` has the rates that kernels reach.
"""

import dataclasses
import re
from typing import Literal, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean

GIB = 2**30

OUTSIDE_TORCH = 2 * GIB
"""The CUDA context, NCCL's buffers and libraries' workspaces: 1.5 to 2.5 GB above torch's count in published runs."""
HEADROOM = 0.05
"""The fraction of a GPU that is left free by default, for fragmentation of torch's allocator and effects that are
not modelled."""
Answer = Literal["fits", "tight", "does not fit"]
DEFAULT = "H100"
"""The GPU that recipes are laid out for."""

GENERATIONS = ("volta", "ampere", "hopper", "blackwell")
_WATTS_PER_TERAFLOP = {"volta": 300 / 125, "ampere": 400 / 312, "hopper": 700 / 989, "blackwell": 1000 / 2250}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU and the machine that usually holds it.

    Attributes:
        name: the name in the table, such as "H100".
        memory: the bytes that torch reports as ``total_memory`` (in its out-of-memory messages: "GPU 0 has a total
            capacity of ..."), which differ from the name: 80 GB are 74.5 GiB by the vendors' decimal count, and 79.1
            GiB on an H100 of "80 GB".
        capability: the CUDA compute capability.
        hbm: the memory's bytes per second.
        flops: the dense FLOP/s of the matrix units by precision: "bf16" (and fp16), "fp8", and "fp4" if the GPU has it.
        nvlink: the bytes per second and direction between GPUs of one NVLink domain, or of PCIe without NVLink.
        domain: the number of GPUs in one NVLink domain.
        network: the bytes per second and direction of a GPU's own network adapter.
        power: watts per 16-bit FLOP/s, relative to its generation's first data-center GPU. A chip with a higher value
            runs its matrix units at a higher clock.
        generation: the generation whose kernels it runs, one of `GENERATIONS`.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    hbm: float
    flops: dict[str, float]
    nvlink: float
    domain: int
    network: float
    power: float
    generation: str

    def rate(self, precision: str) -> float:
        """The dense FLOP/s in ``precision``. A precision that the GPU lacks runs in bf16; fp32 runs in TF32, at half
        of bf16's rate."""
        return self.flops["bf16"] / 2 if precision == "fp32" else self.flops.get(precision, self.flops["bf16"])


# GiB that torch sees, compute capability, TB/s of the memory, dense TFLOP/s, GB/s of NVLink and its domain, GB/s of the network,
# watts, generation.
# Sources: messages of torch for the memory; NVIDIA's list of CUDA GPUs for the capability; for the rest NVIDIA's data sheets of
# each product (rates without sparsity; NVLink: half of the printed bidirectional figure) and of the DGX, HGX or NVL machine it is
# sold in (V100: 4 x 100 Gb/s for 8 GPUs, A100: 8 x 200 Gb/s, H100 and later: 8 x 400 Gb/s, B300 and GB300: 800 Gb/s each; GH200:
# the board of four with 200 Gb/s each). A40, L4, L40S and RTX 4090: PCIe 4.0 x16; T4: PCIe 3.0 x16. Turing's kernels are taken as
# Volta's, Ada's as Ampere's. H100 PCIe and NVL are other chips than these.
_Sheet = tuple[float, tuple[int, int], float, dict[str, float], float, int, float, int, str]
_SHEETS: dict[str, _Sheet] = {
    "V100-16": (15.77, (7, 0), 0.9, {"bf16": 125}, 150, 8, 6.25, 300, "volta"),
    "V100": (31.73, (7, 0), 0.9, {"bf16": 125}, 150, 8, 6.25, 300, "volta"),
    "T4": (14.56, (7, 5), 0.32, {"bf16": 65}, 16, 8, 6.25, 70, "volta"),
    "A100-40": (39.39, (8, 0), 1.555, {"bf16": 312}, 300, 8, 25, 400, "ampere"),
    "A100": (79.15, (8, 0), 2.039, {"bf16": 312}, 300, 8, 25, 400, "ampere"),
    "A800": (79.15, (8, 0), 2.039, {"bf16": 312}, 200, 8, 25, 400, "ampere"),
    "A40": (44.35, (8, 6), 0.696, {"bf16": 149.7}, 32, 8, 25, 300, "ampere"),
    "L4": (22.03, (8, 9), 0.3, {"bf16": 121, "fp8": 242.5}, 32, 8, 12.5, 72, "ampere"),
    "L40S": (44.40, (8, 9), 0.864, {"bf16": 362, "fp8": 733}, 32, 8, 25, 350, "ampere"),
    "RTX4090": (23.52, (8, 9), 1.008, {"bf16": 165, "fp8": 330}, 32, 8, 12.5, 450, "ampere"),
    "H20": (95.00, (9, 0), 4.0, {"bf16": 148, "fp8": 296}, 450, 8, 50, 400, "hopper"),
    "H800": (79.10, (9, 0), 3.35, {"bf16": 989, "fp8": 1979}, 200, 8, 50, 700, "hopper"),
    "H100": (79.10, (9, 0), 3.35, {"bf16": 989, "fp8": 1979}, 450, 8, 50, 700, "hopper"),
    "H200": (139.72, (9, 0), 4.8, {"bf16": 989, "fp8": 1979}, 450, 8, 50, 700, "hopper"),
    "GH200": (94.88, (9, 0), 4.0, {"bf16": 989, "fp8": 1979}, 450, 4, 25, 700, "hopper"),
    "B200": (178.35, (10, 0), 8.0, {"bf16": 2250, "fp8": 4500, "fp4": 9000}, 900, 8, 50, 1000, "blackwell"),
    "GB200": (184.00, (10, 0), 8.0, {"bf16": 2500, "fp8": 5000, "fp4": 10000}, 900, 72, 50, 1200, "blackwell"),
    "B300": (267.69, (10, 3), 8.0, {"bf16": 2250, "fp8": 4500, "fp4": 13500}, 900, 8, 100, 1200, "blackwell"),
    "GB300": (276.60, (10, 3), 8.0, {"bf16": 2500, "fp8": 5000, "fp4": 15000}, 900, 72, 100, 1400, "blackwell"),
}
NAMES = tuple(_SHEETS)
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


def gpu(name: str) -> GPU:
    """The GPU called ``name``, in any case. For ``H100x1152``, the part before the number.

    Args:
        name: The name, or name and number.

    Raises:
        ConfigError: the GPU is not in the table.
    """
    return parse_gpus(name)[0]


def parse_gpus(
    text: str, *, option: str = "--gpus", also: str = "with or without a number as in H100x1152"
) -> tuple[GPU, Optional[int]]:
    """The GPU and the number of ``"H100x1152"`` or ``"1152xH100"``. A number of None, as for ``"H100"``: the recipe's
    number.

    ``option`` is the option that errors name, and ``also`` what they say about it besides the GPUs.

    Raises:
        ConfigError: an unknown GPU, or an invalid number.
    """
    name, number = text.strip().upper(), None
    # The whole text first, because "RTX4090" is a name, and not 4,090 of "RT".
    if _ALSO.get(name, name) not in _SHEETS and (match := re.fullmatch(r"([A-Z0-9-]+?)[X*](\d+)", name)):
        name, number = match[1], int(match[2])
    elif match := re.fullmatch(r"(\d+)[X*]([A-Z][A-Z0-9-]*)", name):
        name, number = match[2], int(match[1])
    name = _ALSO.get(name, name)
    if number == 0 or (name.isdigit() and int(name) == 0):
        raise ConfigError(f"{option} {text!r}: the number of GPUs must be at least 1.")
    if name not in _SHEETS:
        raise ConfigError(
            f"{option} {text!r}: must be one of {', '.join(NAMES)}, {also}{did_you_mean(name, NAMES, listed=True)}"
        )
    return _gpu(name), number


def model_of(device_name: str) -> Optional[str]:
    """ "h100" for "NVIDIA H100 80GB HBM3". None: the name contains no model."""
    match = re.search(r"\b(G?[A-Z]\d{2,4}S?)\b", device_name.upper())
    return match[1].lower() if match else None


def _gpu(name: str) -> GPU:
    memory, capability, hbm, flops, nvlink, domain, network, watts, generation = _SHEETS[name]
    return GPU(
        name=name,
        memory=round(memory * GIB),
        capability=capability,
        hbm=hbm * 1e12,
        flops={kind: rate * 1e12 for kind, rate in flops.items()},
        nvlink=nvlink * 1e9,
        domain=domain,
        network=network * 1e9,
        power=watts / flops["bf16"] / _WATTS_PER_TERAFLOP[generation],
        generation=generation,
    )


def answer_of(needed: float, capacity: float, *, headroom: float = HEADROOM, margin: float = 0.0) -> Answer:
    """Whether ``needed`` bytes fit into a GPU of ``capacity`` bytes. "tight": with less than the fraction ``headroom``
    left free, or depending on the error ``margin``, a fraction of ``needed``."""
    if needed * (1 + margin) <= capacity * (1 - headroom):
        return "fits"
    return "does not fit" if needed * (1 - margin) > capacity else "tight"
