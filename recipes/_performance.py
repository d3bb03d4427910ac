# SPDX-License-Identifier: Apache-2.0
"""What ``performance_mode`` adds to a built recipe."""

from typing import Any, Optional


def overlap_and_collect(recipe: Any, *, tp_comm_overlap: Optional[bool] = False) -> Any:
    """Overlaps communication, collects garbage on all ranks at once, reduces gradients in 16 bits. Edits ``recipe``.

    A callback that the recipe already has is kept as it is. Source: NeMo 2.0's ``pretrain_performance_optimizations``.
    """
    from nemo2.callbacks.garbage_collection import GarbageCollectionCallback
    from nemo2.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
    from nemo2.config import Config

    callbacks = list(recipe.trainer.callbacks or [])
    for callback in (
        Config(GarbageCollectionCallback, gc_interval_train=100, gc_interval_val=100),
        Config(MegatronCommOverlapCallback, tp_comm_overlap=tp_comm_overlap),
    ):
        if not any(isinstance(known, callback.__fn_or_cls__) for known in callbacks):
            callbacks.append(callback)
    recipe.trainer.callbacks = callbacks
    recipe.trainer.plugins.grad_reduce_in_fp32 = False
    recipe.optim.config.use_precision_aware_optimizer = False
    return recipe
