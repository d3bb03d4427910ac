# SPDX-License-Identifier: Apache-2.0
"""Precisions by name, as configs of ``MegatronMixedPrecision``.

Parameters and activations are 16 bit in all except `fp32`. Only matrix products use FP8. Names and values are NeMo
2.0's (``llm.recipes.precision.mixed_precision``). Transformer Engine's manual describes the FP8 recipes.
"""

from typing import Any

from nemo2.config import Config


def fp32() -> Config:
    """float32 everywhere, for CPUs without fast 16-bit arithmetic and for comparisons. Not in NeMo."""
    from nemo2 import MegatronMixedPrecision

    return Config(MegatronMixedPrecision, precision="32")


def bf16_mixed() -> Config:
    """bfloat16, gradients reduced in fp32."""
    return _plugin("bf16")


def fp16_mixed() -> Config:
    """float16 with loss scaling, gradients reduced in float16."""
    return _plugin("fp16")


def bf16_with_fp8_mixed() -> Config:
    """bfloat16 and FP8 with delayed scaling: scaling factors come from the last 1,024 maxima."""
    return _plugin("bf16", **_DELAYED)


def fp16_with_fp8_mixed() -> Config:
    """float16 and FP8 with delayed scaling."""
    return _plugin("fp16", **_DELAYED)


def bf16_with_mxfp8_mixed() -> Config:
    """bfloat16 and MXFP8: a scaling factor per 32 values. Blackwell only."""
    return _plugin("bf16", **_MXFP8)


def fp16_with_mxfp8_mixed() -> Config:
    """float16 and MXFP8. Blackwell only."""
    return _plugin("fp16", **_MXFP8)


def bf16_with_fp8_current_scaling_mixed() -> Config:
    """bfloat16 and FP8 with a scaling factor per tensor from its current maximum. The first and the last layer stay
    in bfloat16."""
    return _plugin("bf16", **_current_scaling("tensorwise", layers_in_bf16=1))


def nemotron_h_bf16_with_fp8_current_scaling_mixed() -> Config:
    """`bf16_with_fp8_current_scaling_mixed` with two layers at each end in bfloat16."""
    return _plugin("bf16", **_current_scaling("tensorwise", layers_in_bf16=2))


def nanov2_bf16_with_fp8_current_scaling_mixed() -> Config:
    """bfloat16 and FP8 with a scaling factor per block rather than per tensor. Two layers at each end stay in
    bfloat16."""
    return _plugin("bf16", **_current_scaling("blockwise", layers_in_bf16=2))


def fp16_with_fp8_current_scaling_mixed() -> Config:
    """float16 and FP8 with a scaling factor per tensor. The first and the last layer stay in 16 bit."""
    return _plugin("fp16", **_current_scaling("tensorwise", layers_in_bf16=1))


def bf16_with_fp8_subchannel_scaling_mixed() -> Config:
    """bfloat16 and FP8 with a scaling factor per block of 128. Hopper and newer."""
    return _plugin("bf16", **_SUBCHANNEL)


def fp16_with_fp8_subchannel_scaling_mixed() -> Config:
    """float16 and FP8 with a scaling factor per block of 128. Hopper and newer."""
    return _plugin("fp16", **_SUBCHANNEL)


_DELAYED: dict[str, Any] = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_margin": 0,
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "fp8_param_gather": True,
}
_MXFP8: dict[str, Any] = {
    "fp8": "hybrid",
    "fp8_recipe": "mxfp8",
    "fp8_param_gather": True,
    "reuse_grad_buf_for_mxfp8_param_ag": True,
}
_SUBCHANNEL: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False}


def _current_scaling(recipe: str, *, layers_in_bf16: int) -> dict[str, Any]:
    return {
        "fp8": "hybrid",
        "fp8_recipe": recipe,
        "first_last_layers_bf16": True,
        "fp8_param_gather": True,
        "num_layers_at_start_in_bf16": layers_in_bf16,
        "num_layers_at_end_in_bf16": layers_in_bf16,
    }


def _plugin(dtype: str, **settings: Any) -> Config:
    from nemo2 import MegatronMixedPrecision

    if dtype == "fp16":
        return Config(MegatronMixedPrecision, precision="16-mixed", grad_reduce_in_fp32=False, **settings)
    # The dtypes of parameters and pipeline follow `precision`, so that editing it changes them too.
    return Config(MegatronMixedPrecision, precision="bf16-mixed", **settings)
