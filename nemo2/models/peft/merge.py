# SPDX-License-Identifier: Apache-2.0
"""Merges adapters into the weights that they were trained with."""

from typing import Any

import torch
from torch import nn

from nemo2.mcore.parallel.transform import forget_transform
from nemo2.models.peft.adapter import Adapted


@torch.no_grad()
def merge(core: nn.Module) -> None:
    """Merge every adapter of a model chunk into its layer's weight on this rank, and restore the plain layer.

    Sums are computed in fp32 and rounded once.
    """
    for parent in list(core.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Adapted):
                layer: Any = child.to_wrap
                layer.weight.copy_(child.merged_weight())
                setattr(parent, name, layer)
                if hasattr(layer, "return_layernorm_output"):
                    layer.return_layernorm_output = False
    forget_transform(core)
