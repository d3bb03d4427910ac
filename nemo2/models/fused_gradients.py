# SPDX-License-Identifier: Apache-2.0
"""``gradient_accumulation_fusion``: a matrix product adds a weight's gradient directly to its buffer.

Transformer Engine's layers do so themselves. Megatron-Core's linear layers, including every model's output layer, need
an Apex extension for it, and raise without it. With this module the former fuse and the latter don't.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import nn

from nemo2.base.backend.extras import APEX, has, have_te
from nemo2.base.variables import replaced


def fusing_where_possible(build: Callable[[], nn.Module]) -> Any:
    """The model that ``build`` makes. Without Apex, Megatron-Core's own linear layers in it don't fuse, and don't raise."""
    if has(APEX) or not have_te():
        return build()
    with replaced(layers, _grad_accum_fusion_available=True):
        model = build()
    for module in model.modules():
        if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
            module.gradient_accumulation_fusion = False
    return model
