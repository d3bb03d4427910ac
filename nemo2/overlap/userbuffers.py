# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's userbuffers: the memory that overlapped GEMMs of a tensor-parallel group exchange."""

import inspect
from typing import Any, Optional

import torch

from nemo2.overlap.tp_overlap_cfg import userbuffer_settings


def start_userbuffers(
    *,
    tokens: int,
    hidden_size: int,
    tensor_parallel: int,
    dtype: torch.dtype,
    fp8: bool,
    some_layers_in_16_bits: bool,
    settings: Any,
    bootstrap_backend: Optional[str],
) -> None:
    """Allocate them; once per process, on every rank, before the first forward pass.

    ``tokens`` are those of a micro-batch on this rank before sequence parallelism cuts them: sequence length times
    micro-batch over the context-parallel size. ``some_layers_in_16_bits`` beside those in ``fp8`` get buffers of their own.
    ``settings`` None: Transformer Engine's own for every GEMM.

    Raises:
        ConfigError: settings that Transformer Engine would refuse.
    """
    from transformer_engine.pytorch.module.base import initialize_ub  # pyright: ignore[reportMissingImports]

    arguments: dict[str, Any] = {
        "shape": [tokens, hidden_size],
        "tp_size": tensor_parallel,
        "dtype": dtype,
        "ub_cfgs": userbuffer_settings(settings, quantized=fp8),
        "bootstrap_backend": bootstrap_backend,
    }
    # Transformer Engine 2.8 replaced the flag by a list with one mode per buffer set, and warns of the flag.
    if "quantization_modes" in inspect.signature(initialize_ub).parameters:
        from transformer_engine.pytorch.module.base import (  # pyright: ignore[reportMissingImports]
            UserBufferQuantizationMode,
        )

        modes = [UserBufferQuantizationMode.FP8 if fp8 else UserBufferQuantizationMode.NONE]
        if fp8 and some_layers_in_16_bits:
            modes.append(UserBufferQuantizationMode.NONE)
        arguments["quantization_modes"] = modes
    else:
        arguments["use_fp8"] = fp8
    initialize_ub(**arguments)
