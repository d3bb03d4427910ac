# SPDX-License-Identifier: Apache-2.0
"""Adam: Megatron-Core's as a config of ``MegatronOptimizerModule``, torch's and Transformer Engine's as configs of
``PytorchOptimizerModule``."""

from typing import Optional

from megatron.core.optimizer import OptimizerConfig
from torch.optim import Adam

from nemo2.config import Config
from nemo2.recipes.optim._common import annealed, flat


def distributed_fused_adam_with_cosine_annealing(
    precision: Optional[str] = None,
    warmup_steps: int = 2000,
    constant_steps: int = 0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    max_lr: float = 1e-4,
    min_lr: Optional[float] = None,
    clip_grad: float = 1.0,
) -> Config:
    """Adam with the distributed optimizer: linear warm-up to ``max_lr``, then a cosine down to ``min_lr`` (None: a
    tenth).

    ``precision`` ("bf16-mixed", "16-mixed", "32") sets the dtypes of the optimizer. None: the trainer's precision
    plugin sets the dtypes of model, gradients and optimizer together. ``constant_steps`` keep ``min_lr`` at the end.
    """
    from nemo2 import MegatronOptimizerModule

    config = Config(
        OptimizerConfig,
        optimizer="adam",
        lr=max_lr,
        weight_decay=0.1,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=1e-5,
        use_distributed_optimizer=True,
        clip_grad=clip_grad,
    )
    if precision is not None:
        config.bf16 = precision in ("bf16-mixed", "bf16")
        config.fp16 = precision in ("16-mixed", "fp16", "16")
    optim = Config(MegatronOptimizerModule, config=config)
    return annealed(optim, max_lr=max_lr, min_lr=min_lr, warmup_steps=warmup_steps, constant_steps=constant_steps)


def pytorch_adam_with_cosine_annealing(
    warmup_steps: int = 2000,
    constant_steps: int = 0,
    max_lr: float = 1e-5,
    min_lr: Optional[float] = None,
    weight_decay: float = 0.01,
    foreach: bool = False,
) -> Config:
    """Torch's Adam: linear warm-up to ``max_lr``, then a cosine down to ``min_lr`` (None: a tenth)."""
    optim = pytorch_adam_with_flat_lr(max_lr, weight_decay, foreach)
    return annealed(optim, max_lr=max_lr, min_lr=min_lr, warmup_steps=warmup_steps, constant_steps=constant_steps)


def pytorch_adam_with_flat_lr(lr: float = 1e-5, weight_decay: float = 0.01, foreach: bool = True) -> Config:
    """Torch's Adam with a constant learning rate."""
    return flat(Adam, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.999), eps=1e-8, foreach=foreach)


def te_adam_with_cosine_annealing(
    warmup_steps: int = 2000,
    constant_steps: int = 0,
    max_lr: float = 1e-5,
    min_lr: Optional[float] = None,
    weight_decay: float = 0.01,
) -> Config:
    """Transformer Engine's Adam, with fp32 copies of 16-bit parameters. Otherwise as
    `pytorch_adam_with_cosine_annealing`."""
    optim = te_adam_with_flat_lr(max_lr, weight_decay)
    return annealed(optim, max_lr=max_lr, min_lr=min_lr, warmup_steps=warmup_steps, constant_steps=constant_steps)


def te_adam_with_flat_lr(lr: float = 1e-5, weight_decay: float = 0.01) -> Config:
    """Transformer Engine's Adam with a constant learning rate."""
    from nemo2.mcore.optim.pytorch import fused_adam

    return flat(fused_adam, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.999), eps=1e-8, master_weights=True)
