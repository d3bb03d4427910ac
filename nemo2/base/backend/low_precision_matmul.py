# SPDX-License-Identifier: Apache-2.0
"""Matrix products in bfloat16 and float16, on processors without instructions for them."""

import platform
from collections.abc import Callable
from typing import Any

import torch

_OPERATORS = ("mm", "bmm", "addmm", "baddbmm")
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def is_slow() -> bool:
    """Whether torch multiplies matrices in bfloat16 element by element here: on x86, oneDNN needs AVX-512 for it. A product
    takes up to 90 times as long as in float32. False where torch is too old to replace it."""
    if not hasattr(torch.library, "get_kernel"):
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def in_float32() -> Any:
    """Compute products in bfloat16 and float16 in float32, and round the results. Sums are in float32 either way.

    torch's operators themselves are replaced, not their callers, so that this holds for the backward pass too.

    Returns:
        The registration. Its ``_destroy()`` restores torch's own kernels.
    """
    library: Any = torch.library.Library("aten", "IMPL")
    for name in _OPERATORS:
        library.impl(name, _in_float32(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True)
    return library


def _in_float32(kernel: Any) -> Callable[..., torch.Tensor]:
    def matmul(keys: Any, first: torch.Tensor, *others: Any, **factors: Any) -> torch.Tensor:
        if first.dtype not in _LOW_PRECISION:
            return kernel.call_boxed(keys, first, *others, **factors)
        operands = [one.float() if isinstance(one, torch.Tensor) else one for one in (first, *others)]
        return kernel.call_boxed(keys, *operands, **factors).to(first.dtype)

    return matmul
