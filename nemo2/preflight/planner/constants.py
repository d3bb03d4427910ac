# SPDX-License-Identifier: Apache-2.0
"""Efficiencies: the share of the data sheet's rates that kernels, links and machines reach.

`PRIORS` are guesses from physics and from published measurements of single kernels. Each guess states its reason, and
none comes from a fit. ``make calibrate`` adjusts the guesses to published training speeds and writes
``calibrated.json``. A constant that the published speeds don't determine keeps its guess. No constant is specific to a
model or to a source.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALIBRATED = Path(__file__).with_name("calibrated.json")


@dataclasses.dataclass(frozen=True)
class Prior:
    """A guess, and the factor by which it may be off (one standard deviation)."""

    value: float
    spread: float


class Share(Prior):
    """The guess of a share. The calibration never raises a share above 1."""


def _guess(value: float, spread: float) -> Any:
    return dataclasses.field(metadata={"": Prior(value, spread)})


def _share(value: float, spread: float) -> Any:
    return dataclasses.field(metadata={"": Share(value, spread)})


def _by_generation(**priors: Prior) -> Any:
    return dataclasses.field(metadata=priors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Efficiencies of the step-time model, each declared with its prior; the text below it has the
    meaning, and the reason for the guess. Some have a value for each GPU generation."""

    gemm: Mapping[str, float] = _by_generation(
        volta=Share(0.75, 1.15), ampere=Share(0.85, 1.1), hopper=Share(0.78, 1.1), blackwell=Share(0.74, 1.15)
    )
    """Share of the 16-bit data-sheet rate that large matrix products reach. Volta: cuBLAS reports 90 to 100 of 125
    TFLOP/s on a V100. The others: maxima in the MAMF table of stas00/ml-engineering: 271 of 312, 794 of 989, and on
    Blackwell 1,745 of 2,250 and 1,822 of 2,500 TFLOP/s."""
    power: float = _guess(0.5, 1.5)
    """Exponent of a chip's watts per FLOP/s, relative to the first data-center GPU of its generation: at the power
    limit the rate grows more slowly than the power."""
    gemm_fp8: float = _share(0.88, 1.15)
    """Share of the data-sheet rate that 8-bit products reach, relative to 16-bit products: 1,403 of 1,979 over 794 of
    989."""
    gemm_fp4: float = _share(0.7, 1.3)
    """The same for 4-bit products: lower, because the work per byte doubles again."""
    gemm_edge: float = _guess(64, 1.5)
    """Rows or columns that a matrix product wastes: half a tile of 128."""
    gemm_bytes: float = _guess(0.3, 2.0)
    """Share of the operands' memory traffic that arithmetic does not hide: prologues and epilogues."""
    accumulate_bytes: float = _guess(8, 1.3)
    """Bytes per weight and micro-batch: the fp32 gradient is read and written once."""
    cast_bytes: float = _guess(4, 1.5)
    """Bytes per element cast to 8 bits: read in 16 bits, written in 8 bits plain and transposed."""
    flash: Mapping[str, float] = _by_generation(
        volta=Share(0.35, 1.4), ampere=Share(0.55, 1.2), hopper=Share(0.55, 1.2), blackwell=Share(0.5, 1.4)
    )
    """Share of the 16-bit data-sheet rate that fused causal attention reaches in the forward pass. Volta:
    memory-efficient kernels, because it has no FlashAttention-2. Ampere: FlashAttention-2 (arXiv 2307.08691, figure 5),
    less for short rows. Hopper: cuDNN and FlashAttention-3 (arXiv 2407.08608, figure 5). Blackwell: similar to
    Hopper."""
    flash_fp8: float = _guess(1.25, 1.15)
    """Rate of 8-bit attention relative to 16-bit attention: the products are twice as fast, the softmax is not."""
    flash2: float = _share(0.65, 1.2)
    """Rate of FlashAttention-2 relative to the best kernel from Hopper on: FlashAttention-2 targets Ampere and reaches
    a share of 0.35 on Hopper (arXiv 2407.08608, figure 5)."""
    flash1: float = _share(0.55, 1.3)
    """Rate of FlashAttention relative to FlashAttention-2, whose abstract says about twice as fast."""
    score_bytes: float = _guess(20, 1.4)
    """Bytes per stored attention score, both passes: ten 16-bit reads and writes for products, masked softmax and
    dropout."""
    eager_score_bytes: float = _guess(60, 1.5)
    """Bytes per attention score without a fused softmax: ten more accesses in fp32, separate mask and scale."""
    norm_bytes: float = _guess(60, 1.5)
    """Bytes per token and hidden unit of a layer: two norms of 10 forward and 12 backward, two residual sums of 6 and
    2."""
    inner_bytes: float = _guess(8, 1.5)
    """Bytes per unit between the products of a block: a read and a write forward, two reads and a write backward."""
    mixer_bytes: float = _guess(160, 1.5)
    """Bytes per unit of a Mamba mixer, both passes: convolution, a scan of five kernels, gated norm; partly in fp32."""
    eager: float = _guess(2.0, 1.4)
    """Factor on elementwise kernels without fusion: activation, bias, dropout and sum are separate kernels."""
    logit_bytes: float = _guess(24, 1.5)
    """Bytes per logit: a 16-bit write, cast, maximum, exponential and sum in fp32, gradient, cast back."""
    nvlink: float = _share(0.7, 1.3)
    """Share of NVLink's rate: NCCL reaches 370 of 450 GB/s with large messages, less with the messages of a layer."""
    network: float = _share(0.8, 1.3)
    """Share of the network adapter's rate: NCCL reaches 40 of 50 GB/s across many nodes."""
    collective_us: float = _guess(20, 1.5)
    """Microseconds to launch and synchronize one collective, latency included."""
    tp_exposed: float = _share(0.3, 1.5)
    """Share of an overlapped tensor-parallel collective that stays exposed: first and last of four pieces."""
    pp_exposed: float = _share(0.3, 1.5)
    """Share of overlapped pipeline sends that stays exposed: messages that arrive late."""
    exchange: float = _share(0.8, 1.3)
    """Share of a ring's rate that an all-to-all reaches: messages are smaller and more."""
    ep_exposed: float = _share(0.5, 1.4)
    """Share of an overlapped token exchange that stays exposed: its kernels share the GPU with matrix products."""
    dp_exposed: float = _share(0.1, 1.8)
    """Share of the data-parallel collectives that nothing hides: the first and the last bucket."""
    dp_hidden: float = _share(0.7, 1.3)
    """Share of a pass that can hide collectives: computation and collectives slow each other down."""
    fsdp_exposed: float = _share(0.15, 1.8)
    """Share of ZeRO-3's collectives that stays exposed even where computation takes longer."""
    layer_us: float = _guess(600, 1.4)
    """Microseconds of host time per layer: 60 kernels in both passes, 10 microseconds of Python and driver each."""
    moe_us: float = _guess(800, 1.5)
    """Microseconds of host time per expert layer: 80 more kernels for routing, sorting and counts that the host
    awaits."""
    expert_us: float = _guess(60, 1.5)
    """Microseconds of host time per expert on a rank: six matrix products, 10 microseconds each."""
    expert_cast_us: float = _guess(240, 1.6)
    """Microseconds of host time per expert below 16 bits: casts of four tensors, six calls each, 10 microseconds a
    call."""
    graphed: float = _share(0.15, 1.6)
    """Share of the launch time that remains with CUDA graphs."""
    expert_gemm: float = _share(0.75, 1.25)
    """Share of a linear layer's rate that grouped products reach: rows are few and uneven."""
    sort_bytes: float = _guess(32, 1.5)
    """Bytes per token copy and hidden unit, both passes: two reads and two writes before the expert and after it."""
    optimizer_bytes: float = _guess(50, 1.5)
    """Bytes per weight: gradient, fp32 weight and two moments are read and written; norm, scaling, zeroing."""
    step_ms: float = _guess(20, 1.5)
    """Milliseconds per step outside of kernels: data, norms across ranks, logging."""
    scale: float = _guess(0.01, 1.8)
    """Share of the computation lost per doubling of nodes: the slowest of more nodes is slower."""

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "Constants":
        """The constants from ``values``, which are named as in `PRIORS`."""
        fields: dict[str, Any] = {}
        for name, value in values.items():
            field, _, generation = name.partition(".")
            if generation:
                fields.setdefault(field, {})[generation] = value
            else:
                fields[field] = value
        return cls(**fields)


PRIORS: dict[str, Prior] = {
    f"{field.name}.{generation}".removesuffix("."): prior
    for field in dataclasses.fields(Constants)
    for generation, prior in field.metadata.items()
}
"""The priors by the names of constants: ``power``, ``gemm.hopper``."""
GUESSED = Constants.of({name: prior.value for name, prior in PRIORS.items()})


@functools.cache
def calibration() -> dict[str, Any]:
    """The result of ``make calibrate``: ``constants`` by name, and ``errors`` by kind of job.

    The errors are those of predictions for a project whose measurements the calibration left out.
    """
    return json.loads(CALIBRATED.read_text(encoding="utf-8"))


@functools.cache
def calibrated() -> Constants:
    """The constants fitted to published training speeds."""
    return Constants.of(calibration()["constants"])
