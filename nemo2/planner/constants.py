# SPDX-License-Identifier: Apache-2.0
"""Efficiencies: the share of the data sheet's rates that kernels, links and machines reach.

`PRIORS` are guesses from physics and from published measurements of single kernels, each with its reason; none of them is taken
from a fit. ``make calibrate`` moves them as far as published training speeds ask for and writes
``calibrated.json``; what those don't tell stays where the guess is. None of them belongs to a model or to a source.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo2.gpus import GENERATIONS

CALIBRATED = Path(__file__).with_name("calibrated.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByGeneration:
    """A constant for each GPU generation."""

    volta: float
    ampere: float
    hopper: float
    blackwell: float

    def __getitem__(self, generation: str) -> float:
        return getattr(self, generation)


@dataclasses.dataclass(frozen=True)
class Prior:
    """A guess, the factor by which it may be off (one standard deviation), and why it is that."""

    value: float
    spread: float
    why: str


class Share(Prior):
    """The guess of a share, which no calibration may raise above 1."""


_GEMM = (
    "share of the 16-bit data-sheet rate that large products reach: measured maxima, stas00/ml-engineering's MAMF table"
)
_FLASH = "share of the 16-bit rate that fused causal attention reaches forward"

PRIORS: dict[str, Prior] = {
    "gemm.volta": Share(0.75, 1.15, f"{_GEMM} has no V100; cuBLAS' own figures are 90 to 100 of 125 TFLOP/s"),
    "gemm.ampere": Share(0.85, 1.1, f"{_GEMM}, 271 of 312 TFLOP/s"),
    "gemm.hopper": Share(0.78, 1.1, f"{_GEMM}, 794 of 989 TFLOP/s"),
    "gemm.blackwell": Share(0.74, 1.15, f"{_GEMM}, 1745 of 2250 and 1822 of 2500 TFLOP/s"),
    "power": Prior(
        0.5, 1.5, "exponent of a chip's power over its generation's: a rate at the limit grows slower than its watts"
    ),
    "gemm_fp8": Share(
        0.88, 1.15, "share of their rate that 8 bits reach, over that of 16: 1403 of 1979 over 794 of 989"
    ),
    "gemm_fp4": Share(0.7, 1.3, "share as of 8 bits; less, for the work per byte doubles again"),
    "gemm_edge": Prior(64, 1.5, "rows or columns that a product wastes: half a tile of 128"),
    "gemm_bytes": Prior(
        0.3, 2.0, "of the operands' traffic that does not run beside the arithmetic: prologues and epilogues"
    ),
    "accumulate_bytes": Prior(8, 1.3, "fp32 gradients are read and written once per micro-batch"),
    "cast_bytes": Prior(4, 1.5, "16 bits read, 8 bits written twice, as it is and transposed"),
    "flash.volta": Share(0.35, 1.4, f"{_FLASH}; memory-efficient kernels, there is no FlashAttention-2 for it"),
    "flash.ampere": Share(
        0.55, 1.2, f"{_FLASH}: FlashAttention-2's figures (arXiv 2307.08691, figure 5), less for short rows"
    ),
    "flash.hopper": Share(0.55, 1.2, f"{_FLASH}: cuDNN and FlashAttention-3 (arXiv 2407.08608, figure 5)"),
    "flash.blackwell": Share(0.5, 1.4, f"{_FLASH}: as on Hopper"),
    "flash_fp8": Prior(
        1.25, 1.15, "of the 16-bit rate in 8 bits: products twice as fast, the softmax between them not"
    ),
    "flash2": Share(
        0.65, 1.2, "share, from Hopper on: FlashAttention-2 is made for Ampere, and reaches 0.35 (same figure)"
    ),
    "flash1": Share(0.55, 1.3, "share: FlashAttention-2 is about twice as fast (its abstract)"),
    "score_bytes": Prior(
        20, 1.4, "ten 16-bit reads and writes of every score: products, masked softmax, dropout, both passes"
    ),
    "eager_score_bytes": Prior(60, 1.5, "as many again in fp32, and a mask and a scale of their own"),
    "norm_bytes": Prior(
        60,
        1.5,
        "per token and hidden unit, both passes: two norms of 10 bytes forward and 12 back, two residual sums of 6 and 2",
    ),
    "inner_bytes": Prior(
        8, 1.5, "per unit between a block's products, both passes: read, write, and read twice, write backward"
    ),
    "mixer_bytes": Prior(
        160,
        1.5,
        "per unit of a Mamba mixer, both passes: convolution, a scan of five kernels, gated norm; partly in fp32",
    ),
    "eager": Prior(2.0, 1.4, "an activation, a bias, a dropout and a sum are a kernel each where nothing fuses them"),
    "logit_bytes": Prior(
        24, 1.5, "per logit: written in 16 bits, cast, maximum, exponent and sum in fp32, gradient, cast back"
    ),
    "nvlink": Share(
        0.7, 1.3, "share of NVLink's rate: NCCL's 370 of 450 GB/s for large messages, less for those of a layer"
    ),
    "network": Share(0.8, 1.3, "share of an adapter's rate: NCCL over many machines, 40 of 50 GB/s"),
    "collective_us": Prior(20, 1.5, "launch, synchronisation and latency of one collective"),
    "tp_exposed": Share(
        0.3, 1.5, "share of an overlapped tensor-parallel collective that shows: first and last of four pieces"
    ),
    "pp_exposed": Share(0.3, 1.5, "share of overlapped sends that shows: those that arrive late"),
    "exchange": Share(
        0.8, 1.3, "share of a ring's rate that an exchange of all with all reaches: smaller messages, and more of them"
    ),
    "ep_exposed": Share(
        0.5, 1.4, "share of an overlapped exchange of tokens that shows: kernels that share the GPU with products"
    ),
    "dp_exposed": Share(
        0.1, 1.8, "share of the data-parallel collectives that nothing covers: the first and the last bucket"
    ),
    "dp_hidden": Share(0.7, 1.3, "share of a pass that can cover them: the kernels slow each other down"),
    "fsdp_exposed": Share(0.15, 1.8, "share of ZeRO-3's collectives that shows even where computation takes longer"),
    "layer_us": Prior(600, 1.4, "60 kernels of a layer in both passes, 10 microseconds of Python and driver each"),
    "moe_us": Prior(800, 1.5, "80 kernels more: routing, sorting, counts that the host waits for"),
    "expert_us": Prior(60, 1.5, "of every expert on a rank: six products of its own, 10 microseconds each"),
    "expert_cast_us": Prior(
        240,
        1.6,
        "in fewer than 16 bits: four tensors of its own cast, six kernels or calls each, 10 microseconds a piece",
    ),
    "graphed": Share(0.15, 1.6, "share of launching that is left with CUDA graphs"),
    "expert_gemm": Share(
        0.75, 1.25, "share of a linear layer's rate that grouped products reach: uneven rows, short ones"
    ),
    "sort_bytes": Prior(
        32,
        1.5,
        "per copy of a token and hidden unit, both passes: read and written twice before its expert and twice after",
    ),
    "optimizer_bytes": Prior(
        50, 1.5, "per weight: gradient, fp32 weight, two moments read and written, norm, scaling, zeroing"
    ),
    "step_ms": Prior(20, 1.5, "of a step that belong to no kernel: data, norms across ranks, logging"),
    "scale": Prior(0.01, 1.8, "of the computation per doubling of machines: the slowest of more is slower"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Efficiencies of the step-time model; `PRIORS` says what each is."""

    gemm: ByGeneration
    power: float
    gemm_fp8: float
    gemm_fp4: float
    gemm_edge: float
    gemm_bytes: float
    accumulate_bytes: float
    cast_bytes: float
    flash: ByGeneration
    flash_fp8: float
    flash2: float
    flash1: float
    score_bytes: float
    eager_score_bytes: float
    norm_bytes: float
    inner_bytes: float
    mixer_bytes: float
    eager: float
    logit_bytes: float
    nvlink: float
    network: float
    collective_us: float
    tp_exposed: float
    pp_exposed: float
    exchange: float
    ep_exposed: float
    dp_exposed: float
    dp_hidden: float
    fsdp_exposed: float
    layer_us: float
    moe_us: float
    expert_us: float
    expert_cast_us: float
    graphed: float
    expert_gemm: float
    sort_bytes: float
    optimizer_bytes: float
    step_ms: float
    scale: float

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "Constants":
        """The constants by the names of `PRIORS`."""
        single = {name: value for name, value in values.items() if "." not in name}
        groups = {name.partition(".")[0] for name in values if "." in name}
        parted: dict[str, Any] = {
            group: ByGeneration(**{generation: values[f"{group}.{generation}"] for generation in GENERATIONS})
            for group in groups
        }
        return cls(**single, **parted)


GUESSED = Constants.of({name: prior.value for name, prior in PRIORS.items()})


@functools.cache
def calibration() -> dict[str, Any]:
    """Result of ``make calibrate``: `constants` by name, and `errors` of its left-out predictions by kind of job."""
    return json.loads(CALIBRATED.read_text(encoding="utf-8"))


@functools.cache
def calibrated() -> Constants:
    """The constants that published training speeds ask for."""
    return Constants.of(calibration()["constants"])
