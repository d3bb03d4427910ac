# SPDX-License-Identifier: Apache-2.0
"""A router that selects by softmax scores plus a bias of each expert (ERNIE 4.5).

Megatron-Core 0.16 has that bias with sigmoid scores only. The sigmoid of log(p / (1 - p)) is p, so with these logits in place of
its own, a router with ``moe_router_score_function="sigmoid"`` has the softmax's scores p: it adds the bias to select, and divides
the selected scores by their sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_LARGEST = -1e-6
"""The largest log p, at which the gradient of log(1 - p) is still finite."""


def score_by_softmax(router: Any) -> None:
    """Make a router of sigmoid scores score by softmax. Its z-loss, which comes first, is that of its own logits."""
    router.apply_z_loss = partial(_as_sigmoid, router.apply_z_loss)


def _as_sigmoid(apply_z_loss: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``logits`` [tokens, experts]."""
    log_p = torch.log_softmax(apply_z_loss(logits, *args, **kwargs).float(), dim=-1).clamp(max=_LARGEST)
    return (log_p - torch.log1p(-log_p.exp())).to(logits.dtype)
