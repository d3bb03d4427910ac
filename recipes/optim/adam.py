# SPDX-License-Identifier: Apache-2.0
"""Adam with a schedule, as a config of ``MegatronOptimizerModule``."""

from typing import Optional

from megatron.core.optimizer import OptimizerConfig

from nemo2.config import Config


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
    """Adam with the distributed optimizer; linear warm-up to ``max_lr``, cosine down to ``min_lr`` (None: a tenth).

    ``precision`` ("bf16-mixed", "16-mixed", "32") fixes the dtypes of the optimizer; None leaves them to the trainer's
    precision plugin, which sets model, gradients and optimizer together. ``constant_steps`` hold ``min_lr`` at the end.
    """
    from nemo2 import MegatronOptimizerModule
    from nemo2.optim.lr_scheduler import CosineAnnealingScheduler

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
    return Config(
        MegatronOptimizerModule,
        config=config,
        lr_scheduler=Config(
            CosineAnnealingScheduler,
            warmup_steps=warmup_steps,
            constant_steps=constant_steps,
            min_lr=min_lr if min_lr is not None else 0.1 * max_lr,
        ),
    )
