# SPDX-License-Identifier: Apache-2.0
"""The rate of a large matrix product on this device: the ceiling that a training step is compared with.

Random operands: zeros would be a tenth faster, for they draw less power.
"""

import statistics
import time
from collections.abc import Callable

import torch

from nemo2.base.backend import get_backend

SIZE, TOY_SIZE = 8192, 256


def matrix_product_peaks(*, toy: bool = False, repeats: int = 30) -> dict[str, float]:
    """FLOP/s of a square product in bf16, and in fp8 where the device has it; the median of ``repeats``."""
    size = TOY_SIZE if toy else SIZE
    device = get_backend().device
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    peaks = {"bf16": _rate(lambda: a @ b, size, repeats)}
    if device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        left, right = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        peaks["fp8"] = _rate(
            lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),  # pyright: ignore[reportPrivateImportUsage]
            size,
            repeats,
        )
    return peaks


def _rate(product: Callable[[], torch.Tensor], size: int, repeats: int) -> float:
    for _ in range(5):
        product()
    seconds = []
    for _ in range(repeats):
        get_backend().synchronize()
        started = time.perf_counter()
        for _ in range(10):
            product()
        get_backend().synchronize()
        seconds.append((time.perf_counter() - started) / 10)
    return 2 * size**3 / statistics.median(seconds)
