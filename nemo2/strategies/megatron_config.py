# SPDX-License-Identifier: Apache-2.0
"""The arguments of `MegatronStrategy`: their resolution and their refusals."""

from typing import Any

from nemo2.config.adjust import adjust
from nemo2.errors import ConfigError
from nemo2.parallel.ddp_config import DistributedDataParallelConfig

MAIN_PARAMETERS_TWICE = (
    "strategy.ckpt_load_main_params=True and strategy.ckpt_load_optimizer=True: the optimizer's state holds the main parameters "
    "already. Set one of them to False."
)


def ddp_config_of(ddp: Any) -> DistributedDataParallelConfig:
    if isinstance(ddp, DistributedDataParallelConfig):
        return ddp
    if ddp == "megatron":
        config = DistributedDataParallelConfig()
        # NeMo's default.
        adjust(
            config, "check_for_nan_in_grad", True, why="strategy.ddp='megatron' stops at gradients that aren't finite"
        )
        return config
    if ddp == "pytorch":
        raise ConfigError(
            "strategy.ddp='pytorch': Megatron-Core's optimizer needs Megatron-Core's gradient buffers. Use 'megatron' or a "
            "DistributedDataParallelConfig here; for a model without Megatron parallelism use Lightning's strategy='ddp'."
        )
    raise ConfigError(
        f"strategy.ddp={ddp!r}: must be 'megatron' or a DistributedDataParallelConfig, not {type(ddp).__name__}."
    )


def one_number_of_instances(
    instances: int, ddp_config: DistributedDataParallelConfig, explicit_ddp: frozenset[str]
) -> int:
    """The strategy's and the buffers' count of optimizer instances, which is one: the groups are made by it. 1, the strategy's
    default, is what ``ddp_config`` says."""
    name = "num_distributed_optimizer_instances"
    theirs = ddp_config.num_distributed_optimizer_instances
    if name in explicit_ddp and theirs != instances:
        if instances != 1:
            raise ConfigError(
                f"strategy.{name}={instances} contradicts strategy.ddp_config.{name}={theirs}: both were set, and they govern "
                "one thing. Remove one of them, or make them agree."
            )
        return theirs
    adjust(ddp_config, name, instances, why=f"strategy.{name}")
    return instances


def refuse_what_is_gone(**arguments: Any) -> None:
    """An error for each argument whose meaning Megatron-Core has dropped, or that nemo2 has another way for."""
    why = {
        "moe_extended_tp": "Megatron-Core has dropped it; shard experts with expert_tensor_parallel_size",
        "encoder_tensor_model_parallel_size": "Megatron-Core has dropped encoder-decoder layouts; leave it unset",
        "encoder_pipeline_model_parallel_size": "Megatron-Core has dropped encoder-decoder layouts; leave it unset",
        "lazy_init": "models are built once, in their place; leave it unset",
        "find_unused_parameters": "Megatron-Core's gradient buffers reduce every parameter, used or not; leave it unset",
        "gradient_as_bucket_view": "Megatron-Core's gradients are views of its buffers; leave it unset",
    }
    harmless = {"gradient_as_bucket_view": True}
    problems = [
        f"strategy.{name}={arguments[name]!r}: {reason}."
        for name, reason in why.items()
        if bool(arguments[name]) != harmless.get(name, False)
    ]
    if problems:
        raise ConfigError(" ".join(problems))
