# SPDX-License-Identifier: Apache-2.0
"""What the factories of optimizers share."""

from collections.abc import Callable
from typing import Any, Optional

from nemo2.config import Config, Partial
from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler


def flat(optimizer: Callable[..., Any], **settings: Any) -> Any:
    """``optimizer`` with these settings and a constant learning rate."""
    from nemo2.mcore.optim.pytorch import PytorchOptimizerModule

    return Config(PytorchOptimizerModule, optimizer_fn=Partial(optimizer, **settings))


def annealed(optim: Any, *, max_lr: float, min_lr: Optional[float], warmup_steps: int, constant_steps: int) -> Any:
    """``optim`` with a linear warm-up and a cosine from ``max_lr`` down to ``min_lr`` (None: a tenth)."""
    optim.lr_scheduler = Config(
        CosineAnnealingScheduler,
        warmup_steps=warmup_steps,
        constant_steps=constant_steps,
        min_lr=0.1 * max_lr if min_lr is None else min_lr,
    )
    return optim
