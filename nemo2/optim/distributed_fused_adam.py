# SPDX-License-Identifier: Apache-2.0
"""NeMo's options of the distributed fused Adam, as settings of Megatron-Core's distributed optimizer and gradient buffers.

The options are those of the optimizer table in NeMo's documents (Apex's ``DistributedFusedAdam``). Megatron-Core's
optimizer does the same with other words:

| option | is here |
|---|---|
| ``dtype`` | fp32: Megatron-Core's default. 16 bit or fp8: its precision-aware optimizer, moments in that dtype |
| ``grad_sync_dtype`` | ``ddp_config.grad_reduce_in_fp32``; None: what the precision plugin says |
| ``overlap_grad_sync`` | ``ddp_config.overlap_grad_reduce`` |
| ``overlap_param_sync`` | ``ddp_config.overlap_param_gather``, and the optimizer's view of it |
| ``bucket_cap_mb`` | ``ddp_config.bucket_size``, which counts elements |
| ``contiguous_param_buffer``, ``contiguous_grad_buffer`` | always so: Megatron-Core has one buffer of each per dtype |
| ``average_grad_sync`` | ``ddp_config.average_in_collective`` |
| ``nccl_ub`` | ``ddp_config.nccl_ub`` |
| ``store_param_remainders`` | the same, of the precision-aware optimizer |
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from nemo2.errors import ConfigError
from nemo2.names import did_you_mean

if TYPE_CHECKING:
    from nemo2.config import Config

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp8": torch.uint8,
    "uint8": torch.uint8,
}
_MIB = 1024 * 1024


class DistributedFusedAdam(NamedTuple):
    """The two configs that the options set; `apply_to` puts them into a recipe."""

    config: "Config[Any]"
    """Of Megatron-Core's ``OptimizerConfig``."""
    ddp_config: "Config[Any]"
    """Of Megatron-Core's ``DistributedDataParallelConfig``."""

    def apply_to(self, recipe: Any) -> Any:
        """Set these fields in ``recipe.optim.config`` and ``recipe.strategy.ddp_config``; their others stay. Edits ``recipe``."""
        for name, value in self.config.__arguments__.items():
            setattr(recipe.optim.config, name, value)
        if isinstance(recipe.trainer.strategy.ddp, str):
            # "megatron" stands for buffers that stop at gradients which aren't finite.
            self.ddp_config.check_for_nan_in_grad = True
            recipe.trainer.strategy.ddp = self.ddp_config
        else:
            for name, value in self.ddp_config.__arguments__.items():
                setattr(recipe.trainer.strategy.ddp, name, value)
        return recipe


def distributed_fused_adam(
    lr: Optional[float] = None,
    dtype: Any = torch.float32,
    grad_sync_dtype: Any = None,
    overlap_grad_sync: bool = True,
    overlap_param_sync: bool = False,
    bucket_cap_mb: Optional[float] = 100,
    contiguous_param_buffer: Optional[bool] = None,
    contiguous_grad_buffer: Optional[bool] = None,
    average_grad_sync: Optional[bool] = None,
    nccl_ub: Optional[bool] = None,
    store_param_remainders: Optional[bool] = None,
    betas: Optional[tuple[float, float]] = None,
    eps: Optional[float] = None,
    weight_decay: Optional[float] = None,
    clip_grad: Optional[float] = None,
) -> DistributedFusedAdam:
    """Adam whose state is sharded over the data-parallel ranks, by NeMo's option names.

    Args:
        lr: Peak learning rate. None: what the recipe has.
        dtype: Of the optimizer's moments: torch dtypes or "fp32", "bf16", "fp16", "fp8". The main parameters stay fp32. All
            but fp32 need Transformer Engine's Adam.
        grad_sync_dtype: Of gradients while they are accumulated and reduced: fp32, or the parameters' own 16-bit dtype. None:
            the precision plugin's ``grad_reduce_in_fp32``.
        overlap_grad_sync: Reduce a bucket's gradients while backward goes on.
        overlap_param_sync: Gather a bucket's parameters while forward goes on. Needs ``overlap_grad_sync``.
        bucket_cap_mb: Size of a gradient bucket in MiB, in ``grad_sync_dtype`` (fp32 where that is None). None: what the recipe
            has, else Megatron-Core's choice.
        contiguous_param_buffer, contiguous_grad_buffer: True or None; Megatron-Core's buffers always are.
        average_grad_sync: Let the collective average. None: what the recipe has; Megatron-Core's default divides first.
        nccl_ub: Register the buffers with NCCL. None: what the recipe has.
        store_param_remainders: Keep of the main parameters only what bf16 parameters lack. None: what the recipe has, else
            Megatron-Core's default.
        betas, eps, weight_decay, clip_grad: Of Adam. None: what the recipe has.

    Raises:
        ConfigError: a dtype that Megatron-Core has no optimizer for, options that exclude each other, and what it can't do;
            all of them at once.
    """
    from nemo2.config import Config
    from nemo2.parallel.ddp_config import DistributedDataParallelConfig, OptimizerConfig

    problems: list[str] = []
    state = _dtype("dtype", dtype, problems) or torch.float32
    gradients = None if grad_sync_dtype is None else _dtype("grad_sync_dtype", grad_sync_dtype, problems)
    if gradients == torch.uint8:
        problems.append(
            f"grad_sync_dtype={grad_sync_dtype!r}: gradients are reduced in fp32 or in the parameters' 16-bit dtype."
        )
    for name, value in (
        ("contiguous_param_buffer", contiguous_param_buffer),
        ("contiguous_grad_buffer", contiguous_grad_buffer),
    ):
        if value is False:
            problems.append(f"{name}=False: Megatron-Core's buffers are always contiguous. Leave it out.")
    if overlap_param_sync and not overlap_grad_sync:
        problems.append(
            "overlap_param_sync=True with overlap_grad_sync=False: without overlapped reduction there is one bucket, and nothing "
            "to gather ahead. Set overlap_grad_sync=True, or leave overlap_param_sync out."
        )
    if bucket_cap_mb is not None and bucket_cap_mb <= 0:
        problems.append(f"bucket_cap_mb={bucket_cap_mb} must be more than 0, or None for Megatron-Core's choice.")
    if store_param_remainders is not None and state == torch.float32:
        problems.append(
            f"store_param_remainders={store_param_remainders} concerns the precision-aware optimizer only: set dtype to a 16-bit "
            "or fp8 one, or leave it out."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    config = Config(
        OptimizerConfig, optimizer="adam", use_distributed_optimizer=True, overlap_param_gather=overlap_param_sync
    )
    # Moments in fp32 are said too: the recipe that gets these options may have had others.
    config.use_precision_aware_optimizer = state != torch.float32
    config.exp_avg_dtype = config.exp_avg_sq_dtype = state
    if state == torch.float32:
        config.main_grads_dtype = config.main_params_dtype = torch.float32
    elif gradients is not None:
        config.main_grads_dtype = gradients
    first, second = betas or (None, None)
    _set(
        config,
        lr=lr,
        adam_beta1=first,
        adam_beta2=second,
        adam_eps=eps,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        store_param_remainders=store_param_remainders,
    )
    buffers = Config(
        DistributedDataParallelConfig,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap_grad_sync,
        overlap_param_gather=overlap_param_sync,
    )
    element = (gradients or torch.float32).itemsize
    _set(
        buffers,
        grad_reduce_in_fp32=None if gradients is None else gradients == torch.float32,
        bucket_size=None if bucket_cap_mb is None else int(bucket_cap_mb * _MIB) // element,
        average_in_collective=average_grad_sync,
        nccl_ub=nccl_ub,
    )
    return DistributedFusedAdam(config, buffers)


def _dtype(name: str, value: Any, problems: list[str]) -> Optional[torch.dtype]:
    found = value if isinstance(value, torch.dtype) else _DTYPES.get(str(value).removeprefix("torch."))
    if found in _DTYPES.values():
        return found
    problems.append(f"{name}={value!r}: must be fp32, bf16, fp16 or fp8{did_you_mean(str(value), _DTYPES)}")
    return None


def _set(node: "Config[Any]", **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(node, name, value)
