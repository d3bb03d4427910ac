# SPDX-License-Identifier: Apache-2.0
"""Torch's SGD, as a config of ``PytorchOptimizerModule``."""

from typing import Optional

from torch.optim import SGD

from nemo2.config import Config
from nemo2.recipes.optim._common import annealed, flat


def pytorch_sgd_with_cosine_annealing(
    warmup_steps: int = 2000,
    constant_steps: int = 0,
    max_lr: float = 1e-5,
    min_lr: Optional[float] = None,
    wd: float = 1e-4,
) -> Config:
    """Torch's SGD: linear warm-up to ``max_lr``, then a cosine down to ``min_lr`` (None: a tenth)."""
    optim = flat(SGD, lr=max_lr, weight_decay=wd)
    return annealed(optim, max_lr=max_lr, min_lr=min_lr, warmup_steps=warmup_steps, constant_steps=constant_steps)


def pytorch_sgd_with_flat_lr(lr: float = 1e-5, wd: float = 1e-4) -> Config:
    """Torch's SGD with a constant learning rate."""
    return flat(SGD, lr=lr, weight_decay=wd)
