# SPDX-License-Identifier: Apache-2.0
"""What a GPU can do by its data sheet: rates, memory, links. Efficiencies are not here but in `constants`."""

import dataclasses

from nemo2.rehearse.gpus import parse_gpus

GENERATIONS = ("volta", "ampere", "hopper", "blackwell")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU and the machine that it usually sits in.

    Attributes:
        memory: bytes that torch sees (`nemo2.rehearse.gpus`).
        hbm: bytes per second of the memory.
        flops: dense FLOP/s of the matrix units by precision: "bf16" (and fp16), "fp8", "fp4" where there is one.
        nvlink: bytes per second and direction between GPUs of one NVLink domain; PCIe's where there is no NVLink.
        domain: GPUs of one NVLink domain.
        network: bytes per second and direction of the network adapter that a GPU has to itself.
        power: watts per 16-bit FLOP/s, over that of its generation's first data-centre GPU: a chip with more runs its matrix
            units at a higher clock.
        generation: whose kernels it runs, one of `GENERATIONS`.
    """

    name: str
    memory: float
    hbm: float
    flops: dict[str, float]
    nvlink: float
    domain: int
    network: float
    power: float
    generation: str

    def rate(self, precision: str) -> float:
        """Dense FLOP/s in ``precision``. One that the GPU lacks runs in bf16; fp32 in TF32, at half of bf16's rate."""
        return self.flops["bf16"] / 2 if precision == "fp32" else self.flops.get(precision, self.flops["bf16"])


def gpu(name: str) -> GPU:
    """The GPU called ``name``, whatever its case.

    Raises:
        ConfigError: it is not in the table.
    """
    found, _ = parse_gpus(name)
    hbm, flops, nvlink, domain, network, watts, generation = _SHEETS[found.name]
    return GPU(
        name=found.name,
        memory=found.capacity,
        hbm=hbm * 1e12,
        flops={kind: rate * 1e12 for kind, rate in flops.items()},
        nvlink=nvlink * 1e9,
        domain=domain,
        network=network * 1e9,
        power=watts / flops["bf16"] / _WATTS_PER_TERAFLOP[generation],
        generation=generation,
    )


# TB/s of the memory, dense TFLOP/s, GB/s of NVLink and its domain, GB/s of the network, watts, generation.
# Sources: NVIDIA's data sheets of each product (rates without sparsity; NVLink: half of the printed bidirectional figure) and of
# the DGX, HGX or NVL machine it is sold in (V100: 4 x 100 Gb/s for 8 GPUs, A100: 8 x 200 Gb/s, H100 and later: 8 x 400 Gb/s,
# B300 and GB300: 800 Gb/s each). L40S and RTX 4090: PCIe 4.0 x16. Ada's kernels are Ampere's.
_Sheet = tuple[float, dict[str, float], float, int, float, int, str]
_SHEETS: dict[str, _Sheet] = {
    "V100-16": (0.9, {"bf16": 125}, 150, 8, 6.25, 300, "volta"),
    "V100": (0.9, {"bf16": 125}, 150, 8, 6.25, 300, "volta"),
    "A100-40": (1.555, {"bf16": 312}, 300, 8, 25, 400, "ampere"),
    "A100": (2.039, {"bf16": 312}, 300, 8, 25, 400, "ampere"),
    "A800": (2.039, {"bf16": 312}, 200, 8, 25, 400, "ampere"),
    "L40S": (0.864, {"bf16": 362, "fp8": 733}, 32, 8, 25, 350, "ampere"),
    "RTX4090": (1.008, {"bf16": 165, "fp8": 330}, 32, 8, 12.5, 450, "ampere"),
    "H20": (4.0, {"bf16": 148, "fp8": 296}, 450, 8, 50, 400, "hopper"),
    "H800": (3.35, {"bf16": 989, "fp8": 1979}, 200, 8, 50, 700, "hopper"),
    "H100": (3.35, {"bf16": 989, "fp8": 1979}, 450, 8, 50, 700, "hopper"),
    "H200": (4.8, {"bf16": 989, "fp8": 1979}, 450, 8, 50, 700, "hopper"),
    "B200": (8.0, {"bf16": 2250, "fp8": 4500, "fp4": 9000}, 900, 8, 50, 1000, "blackwell"),
    "B300": (8.0, {"bf16": 2250, "fp8": 4500, "fp4": 13500}, 900, 8, 100, 1200, "blackwell"),
    "GB200": (8.0, {"bf16": 2500, "fp8": 5000, "fp4": 10000}, 900, 72, 50, 1200, "blackwell"),
    "GB300": (8.0, {"bf16": 2500, "fp8": 5000, "fp4": 15000}, 900, 72, 100, 1400, "blackwell"),
}
_WATTS_PER_TERAFLOP = {"volta": 300 / 125, "ampere": 400 / 312, "hopper": 700 / 989, "blackwell": 1000 / 2250}
NAMES = tuple(_SHEETS)
