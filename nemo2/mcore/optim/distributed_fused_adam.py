# SPDX-License-Identifier: Apache-2.0
"""NeMo's options of the distributed fused Adam, as settings of Megatron-Core's distributed optimizer and gradient
buffers.

The options are those of the optimizer table in NeMo's documentation and the arguments of Apex's
``DistributedFusedAdam``. Megatron-Core's optimizer has the same features under other names:

| option | setting in nemo2 |
|---|---|
| ``dtype`` | fp32: Megatron-Core's default. 16 bit or fp8: its precision-aware optimizer, with moments in that dtype |
| ``grad_sync_dtype`` | ``ddp_config.grad_reduce_in_fp32``. None: as the precision plugin says |
| ``param_sync_dtype`` | must equal the parameters' dtype. fp8: the plugin's ``fp8_param_gather`` |
| ``overlap_grad_sync`` | ``ddp_config.overlap_grad_reduce`` |
| ``overlap_param_sync`` | ``ddp_config.overlap_param_gather``, and the optimizer's field of the same name |
| ``bucket_cap_mb`` | ``ddp_config.bucket_size``, which counts elements |
| ``contiguous_param_buffer``, ``contiguous_grad_buffer`` | always on: Megatron-Core has one buffer of each per dtype |
| ``average_grad_sync`` | ``ddp_config.average_in_collective``. Megatron-Core averages without it too |
| ``nccl_ub`` | ``ddp_config.nccl_ub`` |
| ``store_param_remainders`` | the field of the same name, for the precision-aware optimizer |
| ``with_scaled_states`` | on with moments in fp16 or fp8, off otherwise |
| ``adam_w_mode`` | ``optim.config.decoupled_weight_decay`` |
| ``betas``, ``eps``, ``lr``, ``weight_decay`` | ``adam_beta1``, ``adam_beta2``, ``adam_eps``, ``lr``, ``weight_decay`` |

Unsupported values are rejected with an error that names the replacement (`_ONLY`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Optional

import fiddle as fdl
import torch

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.ddp_config import NOTHING_TO_GATHER_AHEAD, DistributedDataParallelConfig, OptimizerConfig
from nemo2.mcore.precision import MegatronMixedPrecision

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
_GROUP = (
    "the optimizer's state is sharded over the data-parallel ranks of the strategy. Leave it out. To shard within "
    "smaller groups of ranks and keep replicas between them, set strategy.num_distributed_optimizer_instances"
)
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias_correction": ((True,), "Megatron-Core's Adam always corrects its moments. Leave it out"),
    "amsgrad": ((False,), "neither Apex nor Megatron-Core has the AMSGrad variant of Adam. Leave it out"),
    "device": (
        (None, "cuda", torch.device("cuda")),
        "the optimizer's state is on the device of the parameters. Leave it out. To keep the state in the host's "
        "memory, set optim.config.optimizer_cpu_offload=True and optim.config.optimizer_offload_fraction=1.0",
    ),
    "process_group": ((None,), _GROUP),
    "distributed_process_group": ((None,), _GROUP),
    "redundant_process_group": ((None,), _GROUP),
    "average_grad_sync": (
        (None, True),
        "Megatron-Core averages gradients over the replicas instead of summing them. Leave it out. For the updates of "
        "summed gradients, divide optim.config.clip_grad and optim.config.adam_eps by the number of replicas, and with "
        "adam_w_mode=False also optim.config.weight_decay",
    ),
    "pipeline_size": (
        (2,),
        "Megatron-Core starts the collective of a bucket as soon as the bucket's gradients are complete, without a "
        "limit on concurrent collectives. Leave it out. bucket_cap_mb sets the size of a collective",
    ),
    "capturable": (
        (False,),
        "CUDA graphs (model.config.cuda_graph_impl) capture the model's part of a step, but not the optimizer. Leave "
        "it out",
    ),
    "disable_distributed_parameters": (
        (False,),
        "set optim.config.use_distributed_optimizer=False and strategy.ddp.use_distributed_optimizer=False instead",
    ),
}
"""Options for which Megatron-Core has a single behavior: the accepted values, and the replacement for any other
value."""


@dataclass(frozen=True)
class DistributedFusedAdam:
    """Hold the settings behind the options. The object unpacks into two configs, and `apply_to` writes them into a
    recipe."""

    config: "Config[Any]"
    """Fields of Megatron-Core's ``OptimizerConfig``."""
    ddp_config: "Config[Any]"
    """Fields of Megatron-Core's ``DistributedDataParallelConfig``."""
    param_sync_dtype: Optional[torch.dtype] = None
    """The dtype of gathered parameters, to be compared with the recipe's precision. None: the precision's dtype."""

    def __iter__(self) -> "Iterator[Config[Any]]":
        return iter((self.config, self.ddp_config))

    def apply_to(self, recipe: Any) -> Any:
        """Apply `changes` to ``recipe`` and return it. Other fields keep their values."""
        for path, value in self.changes(recipe):
            *parents, name = path.split(".")
            setattr(reduce(getattr, parents, recipe), name, value)
        return recipe

    def changes(self, recipe: Any) -> Iterator[tuple[str, Any]]:
        """The paths of ``recipe`` that change and their new values, in the order in which they can be set.

        Raises:
            ConfigError: parameters would be gathered in another dtype than the precision plugin gives them.
        """
        from nemo2.config import Config
        from nemo2.mcore.optim.megatron import MegatronOptimizerModule

        yield from self._gathering(recipe)
        if recipe.optim is None:
            yield "optim", Config(MegatronOptimizerModule, config=self.config)
        else:
            for name, value in self.config.__arguments__.items():
                yield f"optim.config.{name}", value
        for name, value in self.ddp_config.__arguments__.items():
            yield f"trainer.strategy.ddp.{name}", value

    def _gathering(self, recipe: Any) -> Iterator[tuple[str, Any]]:
        requested, plugin = self.param_sync_dtype, recipe.trainer.plugins
        if requested is None:
            return
        if not isinstance(plugin, MegatronMixedPrecision):
            raise ConfigError(
                f"param_sync_dtype={requested}: trainer.plugins sets the dtype of gathered parameters, but is not a "
                "single MegatronMixedPrecision. Leave param_sync_dtype out."
            )
        if requested == torch.uint8 and plugin.fp8 is not None:  # pyright: ignore[reportAttributeAccessIssue]
            yield "trainer.plugins.fp8_param_gather", True
            return
        params_dtype = fdl.build(plugin).dtype_config.params_dtype  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        if requested != params_dtype:
            raise ConfigError(
                f"param_sync_dtype={requested}: parameters are gathered in their own dtype, which trainer.plugins sets to "
                f"{params_dtype}. Leave param_sync_dtype out, or set trainer.plugins.precision. fp8 requires "
                "trainer.plugins.fp8."
            )


@configurable
def distributed_fused_adam(
    *,
    lr: Optional[float] = None,
    bias_correction: bool = True,
    betas: Optional[tuple[float, float]] = None,
    eps: Optional[float] = None,
    adam_w_mode: bool = True,
    weight_decay: Optional[float] = None,
    amsgrad: bool = False,
    dtype: Any = torch.float32,
    grad_sync_dtype: Any = None,
    param_sync_dtype: Any = None,
    device: Any = "cuda",
    process_group: Any = None,
    distributed_process_group: Any = None,
    redundant_process_group: Any = None,
    average_grad_sync: Optional[bool] = None,
    overlap_grad_sync: bool = True,
    overlap_param_sync: bool = False,
    bucket_cap_mb: Optional[float] = 100,
    pipeline_size: int = 2,
    contiguous_param_buffer: Optional[bool] = None,
    contiguous_grad_buffer: Optional[bool] = None,
    store_params: Optional[bool] = None,
    store_param_remainders: Optional[bool] = None,
    with_scaled_states: Optional[bool] = None,
    nccl_ub: Optional[bool] = None,
    capturable: bool = False,
    disable_distributed_parameters: bool = False,
    clip_grad: Optional[float] = None,
) -> DistributedFusedAdam:
    """Configure Adam with its state sharded over the data-parallel ranks, by NeMo's option names.

    Args:
        lr: The peak learning rate. None: the recipe's.
        bias_correction: Must be True.
        adam_w_mode: Decouple weight decay from the gradient (AdamW). False: add it to the gradient (L2 regularization).
        amsgrad: Must be False.
        dtype: The dtype of the optimizer's moments: a torch dtype or "fp32", "bf16", "fp16", "fp8". The main parameters
            stay in fp32. All dtypes except fp32 need Transformer Engine's Adam.
        grad_sync_dtype: The dtype in which gradients are accumulated and reduced: fp32, or the parameters' 16-bit
            dtype. None: as the precision plugin's ``grad_reduce_in_fp32`` says.
        param_sync_dtype: The dtype of gathered parameters: the precision plugin's dtype, or fp8 if the plugin uses fp8
            parameters. None: the plugin's dtype.
        device: "cuda" or None: the optimizer's state is on the parameters' device, also on CPU ranks.
        process_group, distributed_process_group, redundant_process_group: Must be None. The strategy's groups are used.
        average_grad_sync: Average in the collective. None: the recipe's value. Megatron-Core's default divides before
            the collective.
        overlap_grad_sync: Overlap the reduction of each gradient bucket with the backward.
        overlap_param_sync: Overlap the gather of each parameter bucket with the forward. Needs ``overlap_grad_sync``.
        bucket_cap_mb: The size of a gradient bucket in MiB, counted in ``grad_sync_dtype`` or in fp32 if that is None.
            None: the recipe's value, else Megatron-Core's choice.
        pipeline_size: 2, Apex's default. Megatron-Core has no such limit.
        contiguous_param_buffer, contiguous_grad_buffer: Any value. Megatron-Core's buffers are always contiguous.
        store_params: Keep the main parameters in fp32. False needs ``store_param_remainders``. None: True, unless
            ``store_param_remainders`` is set.
        store_param_remainders: Keep only those bits of the main parameters that bf16 parameters lack. Needs Transformer
            Engine's Adam. None: the recipe's value, else Megatron-Core's default.
        with_scaled_states: Scale each moment into its dtype's range. Transformer Engine's Adam does so with fp16 and
            fp8 only.
        nccl_ub: Register the buffers with NCCL. None: the recipe's value.
        capturable: Must be False.
        disable_distributed_parameters: Must be False.
        betas, eps, weight_decay, clip_grad: Adam's hyperparameters and the gradient clipping norm. None: the recipe's
            values.

    Raises:
        ConfigError: Megatron-Core has no optimizer for a dtype, options exclude each other, or an option is
            unsupported. The message lists all problems.
    """
    arguments = dict(locals())
    from nemo2.config import Config

    problems = [
        f"{name}={arguments[name]!r}: {why}." for name, (values, why) in _ONLY.items() if arguments[name] not in values
    ]
    state = _dtype("dtype", dtype, problems) or torch.float32
    gradients = None if grad_sync_dtype is None else _dtype("grad_sync_dtype", grad_sync_dtype, problems)
    gathered = None if param_sync_dtype is None else _dtype("param_sync_dtype", param_sync_dtype, problems)
    if gradients == torch.uint8:
        problems.append(
            f"grad_sync_dtype={grad_sync_dtype!r}: gradients are reduced in fp32 or in the parameters' 16-bit dtype."
        )
    if overlap_param_sync and not overlap_grad_sync:
        problems.append(
            f"overlap_param_sync=True with overlap_grad_sync=False: {NOTHING_TO_GATHER_AHEAD}. Set overlap_grad_sync=True, or "
            "leave overlap_param_sync out."
        )
    if bucket_cap_mb is not None and bucket_cap_mb <= 0:
        problems.append(f"bucket_cap_mb={bucket_cap_mb} must be more than 0, or None for Megatron-Core's choice.")
    if store_params is False and not store_param_remainders:
        problems.append(
            "store_params=False: 16-bit parameters lose small updates, so Megatron-Core always keeps main parameters. "
            "Leave it out, or set store_param_remainders=True, which keeps only the bits that bf16 parameters lack."
        )
    if store_params and store_param_remainders:
        problems.append(
            "store_params=True with store_param_remainders=True: the two options exclude each other, as in Apex. Set "
            "one of them."
        )
    if with_scaled_states and state not in (torch.float16, torch.uint8):
        problems.append(
            f"with_scaled_states=True with dtype={dtype!r}: Transformer Engine's Adam scales only moments in fp16 and "
            "fp8. Set dtype to 'fp16' or 'fp8', or leave with_scaled_states out."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    config = Config(
        OptimizerConfig, optimizer="adam", use_distributed_optimizer=True, overlap_param_gather=overlap_param_sync
    )
    # Moments in fp32 are written out too, because the recipe that receives these options may have used another dtype.
    aware = state != torch.float32 or bool(store_param_remainders)
    config.use_precision_aware_optimizer = aware
    config.exp_avg_dtype = config.exp_avg_sq_dtype = state
    if not aware:
        config.main_grads_dtype = config.main_params_dtype = torch.float32
    elif gradients is not None:
        config.main_grads_dtype = gradients
    config.decoupled_weight_decay = adam_w_mode
    first, second = betas or (None, None)
    _set(
        config,
        lr=lr,
        adam_beta1=first,
        adam_beta2=second,
        adam_eps=eps,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        store_param_remainders=store_param_remainders if aware else None,
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
    return DistributedFusedAdam(config, buffers, gathered)


def _dtype(name: str, value: Any, problems: list[str]) -> Optional[torch.dtype]:
    dtype = value if isinstance(value, torch.dtype) else _DTYPES.get(str(value).removeprefix("torch."))
    if dtype in _DTYPES.values():
        return dtype
    problems.append(
        f"{name}={value!r}: must be fp32, bf16, fp16 or fp8{did_you_mean(str(value), _DTYPES, listed=True)}"
    )
    return None


def _set(node: "Config[Any]", **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(node, name, value)
