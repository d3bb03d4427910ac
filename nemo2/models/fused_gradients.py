# SPDX-License-Identifier: Apache-2.0
"""``gradient_accumulation_fusion``: a matrix product adds a weight's gradient to its buffer itself.

Transformer Engine's layers do so on their own. Megatron-Core's linear layers, of which the output layer is one in every model,
need an extension of Apex for it, and raise where that is missing. Here the ones fuse, and the others don't.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import nn

from nemo2.backend.extras import APEX, has, have_te


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
