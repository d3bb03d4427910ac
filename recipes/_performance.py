# SPDX-License-Identifier: Apache-2.0
"""The settings that ``performance_mode`` adds to a built recipe."""

from functools import partial
from typing import Any, Optional

DEFERRED = {"overlap_param_gather_with_optimizer_step": False, "defer_embedding_wgrad_compute": True}
"""Pipelines compute the output layer's weight gradient in their drain phase."""


def overlap(recipe: Any, *, tp_comm_overlap: Optional[bool] = False, **settings: Any) -> Any:
    """Overlap communication: add ``MegatronCommOverlapCallback`` with these arguments. Edits ``recipe``.

    If the recipe already has such a callback, it stays unchanged.
    """
    from nemo2.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

    return _add(recipe, MegatronCommOverlapCallback, tp_comm_overlap=tp_comm_overlap, **settings)


def overlap_and_collect(recipe: Any, **settings: Any) -> Any:
    """Overlap communication, collect garbage on all ranks at the same steps, and reduce gradients in 16 bits. Edits
    ``recipe``.

    Source: NeMo 2.0's ``pretrain_performance_optimizations``. See `overlap` for the settings.
    """
    from nemo2.callbacks.garbage_collection import GarbageCollectionCallback

    _add(recipe, GarbageCollectionCallback, gc_interval_train=100, gc_interval_val=100)
    overlap(recipe, **settings)
    recipe.trainer.plugins.grad_reduce_in_fp32 = False
    recipe.optim.config.use_precision_aware_optimizer = False
    return recipe


def finetuned(
    recipe: Any,
    peft_scheme: str,
    *,
    gc_interval: int = 100,
    overlap_lora: bool = True,
    targets: Optional[list[str]] = None,
    **overlap_full: Any,
) -> Any:
    """Optimize fine-tuning. Edits ``recipe``.

    Garbage is collected on all ranks at the same steps. Gradients are reduced in 16 bits, overlapped with the backward.
    LoRA is added to ``targets`` (None: ``linear_qkv``) only.

    Source: NeMo 2.0's ``finetune_performance_optimizations``.

    Args:
        overlap_lora: Whether this also applies to LoRA's few gradients.
        overlap_full: Arguments of the overlap callback when all parameters are trained.
    """
    from nemo2.callbacks.garbage_collection import GarbageCollectionCallback

    full = peft_scheme == "none"
    if full:
        from megatron.core.distributed import DistributedDataParallelConfig

        from nemo2.config import Config

        settings = ("check_for_nan_in_grad", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective")
        recipe.trainer.strategy.ddp = Config(DistributedDataParallelConfig, **dict.fromkeys(settings, True))
    else:
        recipe.peft.target_modules = targets or ["linear_qkv"]
    if full or overlap_lora:
        overlap(recipe, **(overlap_full if full else {}))
        recipe.trainer.plugins.grad_reduce_in_fp32 = False
    return _add(recipe, GarbageCollectionCallback, gc_interval_train=gc_interval, gc_interval_val=gc_interval)


finetuned_in_stages = partial(
    finetuned, tp_comm_overlap=True, wgrad_deferral_limit=22, defer_embedding_wgrad_compute=True
)
"""`finetuned` of a pipeline with tensor parallelism."""


def packed_only(recipe: Any, peft_scheme: str) -> Any:
    """A performance mode of fine-tuning that only packs samples, which the recipe already does."""
    return recipe


def drop_tokens(recipe: Any) -> Any:
    """Give every expert the same number of tokens and drop the tokens beyond it, so that no rank waits. Edits
    ``recipe``."""
    recipe.model.config.moe_expert_capacity_factor = 1.0
    recipe.model.config.moe_pad_expert_input_to_capacity = True
    return recipe


def drop_tokens_and_overlap(recipe: Any) -> Any:
    """Apply `drop_tokens` and `overlap_and_collect`, with tensor-parallel overlap. Edits ``recipe``."""
    return overlap_and_collect(drop_tokens(recipe), tp_comm_overlap=True)


def experts_by_tensor(recipe: Any) -> Any:
    """Mixtral's mode: shard experts by tensor parallelism of 8, with expert-parallel size 1, and drop tokens. Edits
    ``recipe``."""
    strategy = recipe.trainer.strategy
    strategy.tensor_model_parallel_size, strategy.expert_model_parallel_size = 8, 1
    strategy.sequence_parallel = True
    settings = {"tp_comm_overlap": None, "overlap_param_gather_with_optimizer_step": False}
    return overlap_and_collect(drop_tokens(recipe), **settings)


def _add(recipe: Any, callback: type, **arguments: Any) -> Any:
    from nemo2.config import Config
    from nemo2.config.walk import callbacks_of

    callbacks = callbacks_of(recipe.trainer)
    if not any(isinstance(one, callback) for one in callbacks):
        callbacks.append(Config(callback, **arguments))
    recipe.trainer.callbacks = callbacks
    return recipe
