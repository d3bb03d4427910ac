# SPDX-License-Identifier: Apache-2.0
"""Resolves and checks the arguments of `MegatronStrategy`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional, Union

from megatron.core.dist_checkpointing.validation import StrictHandling

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.aliases import register_gone, register_text_form
from nemo2.config.notices import warn_without_effect
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_fields
from nemo2.config.tree import Config
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig

_READ_BY_FSDP = (
    *("outer_dp_sharding_strategy", "gradient_reduce_div_fusion", "suggested_communication_unit_size"),
    "keep_fp8_transpose_cache",
)
"""Settings of the gradient buffers, beside those with fsdp_ in their names."""
_UNREAD_BY_FSDP = (
    *("align_param_gather", "check_for_large_grads", "pad_buckets_for_high_nccl_busbw"),
    "param_name_patterns_for_fp32_local_accumulation",
)
_SHARDING_OF_RECIPES = "optim_grads_params"
"""What recipes set `data_parallel_sharding_strategy` to, for a user who turns Megatron-FSDP on."""
_OPTIMIZER_STATE = "ckpt_load_optimizer and ckpt_save_optimizer control whether checkpoints contain optimizer state"
_PRECISION = (
    "dtypes belong to the precision plugin: set nl.Trainer(plugins=nl.MegatronMixedPrecision({})), and leave this "
    "argument out"
)
register_gone(
    "nemo2.training.strategy:MegatronStrategy",
    store_optimizer_states=f"NeMo 2.0 accepts this argument and ignores it; {_OPTIMIZER_STATE}. Leave it out.",
    ckpt_include_optimizer=f"NeMo 2.0 accepts this argument and ignores it; {_OPTIMIZER_STATE}. Leave it out.",
    enable_nemo_ckpt_io=(
        "NeMo 2.0 accepts this argument and ignores it; checkpoint_io writes checkpoints. Leave it out."
    ),
    always_save_context="set nl.ModelCheckpoint(always_save_context=...) instead.",
    ckpt_type="set save_ckpt_format='torch_dist' instead.",
    no_ddp_communication_hook="Megatron-Core's buffers have no such hooks. Leave it out.",
    plugins="plugins belong to the trainer: set nl.Trainer(plugins=...).",
    params_dtype=_PRECISION.format("params_dtype=...") + ".",
    autocast_dtype=_PRECISION.format("autocast_dtype=...") + ".",
    precision=_PRECISION.format("precision=...") + ".",
)


def strictness_of(requested: Optional[Union[str, bool]]) -> Optional[str]:
    """The name of Megatron-Core's ``StrictHandling`` for ``ckpt_load_strictness``. None: Megatron-Core's default.

    Raises:
        ConfigError: there is no such name.
    """
    if requested is None or requested is True:
        return None
    if requested is False:
        return StrictHandling.LOG_ALL.value
    names = [item.value for item in StrictHandling]
    if requested not in names:
        raise ConfigError(
            f"strategy.ckpt_load_strictness={requested!r}: must be None or one of "
            f"{', '.join(names)}{did_you_mean(requested, names, listed=True)}"
        )
    return requested


_OF_THE_TEXT = {"check_for_nan_in_grad": True}
"""The settings that ``ddp="megatron"`` stands for."""


def ddp_node_of(ddp: str) -> Config | None:
    """The config of the gradient buffers that the text ``ddp`` stands for. None: it stands for none."""
    return Config(DistributedDataParallelConfig, **_OF_THE_TEXT) if ddp == "megatron" else None


register_text_form("nemo2.training.strategy:MegatronStrategy", ddp=ddp_node_of)
register_text_form("nemo2.training.fabric:FabricMegatronStrategy", ddp=ddp_node_of)


def ddp_config_of(ddp: Any) -> DistributedDataParallelConfig:
    if isinstance(ddp, DistributedDataParallelConfig):
        return ddp
    if ddp == "megatron":
        config = DistributedDataParallelConfig()
        # NeMo's default.
        for name, value in _OF_THE_TEXT.items():
            adjust(config, name, value, why="strategy.ddp='megatron' stops at gradients that aren't finite")
        return config
    if ddp == "pytorch":
        raise ConfigError(
            "strategy.ddp='pytorch': Megatron-Core's optimizer requires Megatron-Core's gradient buffers. Set "
            "'megatron' or a DistributedDataParallelConfig. For a model without Megatron parallelism, use Lightning's "
            "strategy='ddp'."
        )
    raise ConfigError(
        f"strategy.ddp={ddp!r}: must be 'megatron' or a DistributedDataParallelConfig, not {type(ddp).__name__}."
    )


def unify_num_instances(instances: int, ddp_config: DistributedDataParallelConfig) -> int:
    """Unify the strategy's and the buffers' number of optimizer instances, by which groups are created.

    1, the strategy's default, means the value of ``ddp_config``.
    """
    name = "num_distributed_optimizer_instances"
    theirs = ddp_config.num_distributed_optimizer_instances
    if name in explicit_fields(ddp_config) and theirs != instances:
        if instances != 1:
            raise ConfigError(
                f"strategy.{name}={instances} contradicts strategy.ddp_config.{name}={theirs}. Both control the same "
                "setting. Remove one of them, or set both to the same value."
            )
        return theirs
    adjust(ddp_config, name, instances, why=f"strategy.{name}")
    return instances


def refuse_custom_fsdp(ddp_config: DistributedDataParallelConfig) -> None:
    """Raise an error for ``use_custom_fsdp`` without Megatron-FSDP, of which it is an older name."""
    if getattr(ddp_config, "use_custom_fsdp", False) and not ddp_config.use_megatron_fsdp:
        raise ConfigError(
            "strategy.ddp_config.use_custom_fsdp=True: Megatron-Core no longer reads this older name of Megatron-FSDP, so "
            "nothing would be sharded. Set strategy.fsdp='megatron', and remove use_custom_fsdp."
        )


def warn_about_unread_settings(ddp_config: DistributedDataParallelConfig) -> None:
    """Warn about settings of the gradient buffers that nothing reads in this run."""
    warn_without_effect(
        "Only Megatron-LM's training script reads it: set bucket_size, the number of elements of a bucket.",
        **{"strategy.ddp_config.num_buckets": (getattr(ddp_config, "num_buckets", None), None)},
    )
    sharded = ddp_config.use_megatron_fsdp
    idle = {
        f"strategy.ddp_config.{field.name}": (getattr(ddp_config, field.name), field.default)
        for field in dataclasses.fields(ddp_config)
        if (
            field.name in _UNREAD_BY_FSDP
            if sharded
            else field.name.startswith(("fsdp_", "megatron_fsdp_")) or field.name in _READ_BY_FSDP
        )
    }
    if sharded:
        warn_without_effect("Megatron-FSDP, with buffers of its own, doesn't read it.", **idle)
        return
    if (sharding := ddp_config.data_parallel_sharding_strategy) != "no_shard":
        idle["strategy.ddp_config.data_parallel_sharding_strategy"] = (sharding, _SHARDING_OF_RECIPES)
    warn_without_effect("Only Megatron-FSDP reads it: set strategy.fsdp='megatron', or remove the setting.", **idle)


def refuse_unsupported_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise an error for each argument that Megatron-Core has removed or that nemo2 replaces, and for each value that
    Megatron-Core doesn't support."""
    allowed: dict[str, tuple[Any, ...]] = {
        "pipeline_model_parallel_comm_backend": (None, "nccl", "ucc"),
        "megatron_log_level": (0, 1, 2),
    }
    why = {
        "moe_extended_tp": "Megatron-Core no longer supports it. Set expert_tensor_parallel_size to shard experts",
        "encoder_tensor_model_parallel_size": (
            "Megatron-Core no longer supports encoder-decoder layouts. Leave it unset"
        ),
        "encoder_pipeline_model_parallel_size": (
            "Megatron-Core no longer supports encoder-decoder layouts. Leave it unset"
        ),
        "lazy_init": "nemo2 builds a model once, on its final device. Leave it unset",
        "find_unused_parameters": (
            "Megatron-Core's gradient buffers reduce every parameter, used or not. Leave it unset"
        ),
        "gradient_as_bucket_view": "in Megatron-Core, gradients are always views of its buffers. Leave it unset",
    }
    problems = [
        f"strategy.{name}={arguments[name]!r}: {reason}."
        for name, reason in why.items()
        if bool(arguments[name]) != (name == "gradient_as_bucket_view")
    ]
    problems += [
        f"strategy.{name}={arguments[name]!r}: must be {', '.join(map(repr, values[:-1]))} or {values[-1]!r}."
        for name, values in allowed.items()
        if arguments[name] not in values
    ]
    if problems:
        raise ConfigError(" ".join(problems))
