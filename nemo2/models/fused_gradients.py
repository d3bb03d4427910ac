# SPDX-License-Identifier: Apache-2.0
"""``gradient_accumulation_fusion``: a matrix product adds a weight's gradient to its buffer itself.

Transformer Engine's layers do so on their own. Megatron-Core's linear layers, of which the output layer is one in every model,
need an extension of Apex for it, and raise where that is missing. Here the ones fuse, and the others don't.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import nn

from nemo2.backend.extras import has, have_te

APEX = "fused_weight_gradient_mlp_cuda"


def some_layer_fuses() -> bool:
    """Whether the fusion may be on by default: a package is here that does it. Asks nothing of torch; whether its GPU is here
    too decides the backend."""
    return has(APEX) or has("transformer_engine")


def output_layer_fuses(asked: bool) -> bool:
    """Whether the output layer does, where the model was ``asked`` to."""
    return asked and not (have_te() and not has(APEX))


def fusing_where_possible(build: Callable[[], nn.Module]) -> Any:
    """The model that ``build`` makes. Without Apex, Megatron-Core's own linear layers in it don't fuse, and don't raise."""
    if has(APEX) or not have_te():
        return build()
    before = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        model = build()
    finally:
        layers._grad_accum_fusion_available = before
    for module in model.modules():
        if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
            module.gradient_accumulation_fusion = False
    return model
