# SPDX-License-Identifier: Apache-2.0
"""Reads the facts and settings of the overlap rules from the objects of a run, live or as configs."""

from collections.abc import Iterable, Iterator
from typing import Any, Optional

from nemo2.config.derivations import Setting
from nemo2.config.requested import explicit_values, where_set
from nemo2.overlap.settings import (
    CALLBACK,
    CALLBACK_FIELDS,
    DDP_FIELDS,
    MODEL_FIELDS,
    OPTIMIZER_FIELDS,
    SWITCH_FIELDS,
    OverlapFacts,
)
from nemo2.overlap.userbuffer_limits import without_buffers
from nemo2.parallel.layout import Layout


def facts_of_run(
    *,
    layout: Layout,
    world_size: int,
    model_config: Any,
    optimizer_config: Any,
    data_sampler: Any,
    ddp_config: Any = None,
    gpu: Optional[str] = None,
    transformer_engine_missing: Optional[str] = None,
    output_layer_can_fuse: bool = True,
) -> OverlapFacts:
    """The facts for the overlap rules. A configuration of None means that the run has no such Megatron-Core
    configuration.

    ``gpu``, ``transformer_engine_missing`` and ``output_layer_can_fuse`` describe the machine that trains, a
    `nemo2.settle.Machine`.
    """
    fused = bool(getattr(model_config, "gradient_accumulation_fusion", False))
    # Without a setting, Transformer Engine's attention uses a ring, and plain attention gathers.
    messages = "p2p" if transformer_engine_missing is None else "all_gather"
    return OverlapFacts(
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        virtual_pipeline=layout.vp,
        context_parallel=layout.cp,
        gradient_ranks=max(1, world_size // (layout.tp * layout.pp)),
        sequence_parallel=layout.sp,
        distributed_optimizer=bool(getattr(optimizer_config, "use_distributed_optimizer", False)),
        fused_weight_gradients=fused and output_layer_can_fuse,
        context_messages=str(getattr(model_config, "cp_comm_type", None) or messages),
        **_of_megatron_fsdp(ddp_config),
        transformer_engine_missing=transformer_engine_missing,
        without_buffers=without_buffers(model_config),
        gpu=gpu,
        quantized=getattr(model_config, "fp8", None),
        hidden_size=getattr(model_config, "hidden_size", None),
        micro_batch_size=getattr(data_sampler, "micro_batch_size", None),
        seq_length=getattr(data_sampler, "seq_len", None),
    )


def settings_of_run(
    callbacks: Iterable[Any], *, model_config: Any, optimizer_config: Any, ddp_config: Any
) -> list[Setting]:
    """The user's settings: the callbacks' arguments first, then the explicit fields of the configurations.

    None is not a setting: Megatron-Core decides such a field.
    """
    settings = [setting for callback in callbacks for setting in _settings(callback, CALLBACK, CALLBACK_FIELDS)]
    switch = ("use_distributed_optimizer",)
    for target, owner, names in (
        (ddp_config, "strategy.ddp_config", (*DDP_FIELDS, "num_buckets", *switch)),
        (optimizer_config, "optim.config", (*OPTIMIZER_FIELDS, *switch)),
        (model_config, "model.config", (*MODEL_FIELDS, *SWITCH_FIELDS)),
    ):
        settings += _settings(target, owner, names)
    return settings


def _of_megatron_fsdp(ddp_config: Any) -> dict[str, Any]:
    if not getattr(ddp_config, "use_megatron_fsdp", False):
        return {}
    from nemo2.parallel.fsdp import always_overlapped, not_overlapped

    sharding = ddp_config.data_parallel_sharding_strategy
    return {"always_overlapped": always_overlapped(sharding), "not_overlapped": not_overlapped(sharding)}


def _settings(target: Any, owner: str, names: tuple[str, ...]) -> Iterator[Setting]:
    if target is None:
        return
    values = explicit_values(target)
    for name in names:
        if values.get(name) is not None:
            yield Setting(name, owner, values[name], where_set(target, name))
