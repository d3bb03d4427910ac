# SPDX-License-Identifier: Apache-2.0
"""Merges adapters into the weights that they were trained with."""

from typing import Any, cast

import torch
from torch import Tensor, nn

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
                weight = cast(Tensor, child.to_wrap.weight)
                weight.copy_(child.merged_weight())
                setattr(parent, name, child.to_wrap)
                _give_no_norms(child.to_wrap)
    forget_transform(core)


def _give_no_norms(layer: Any) -> None:
    if hasattr(layer, "return_layernorm_output"):
        layer.return_layernorm_output = False
