# SPDX-License-Identifier: Apache-2.0
"""Writes the decisions of the overlap rules into a run's configurations.

The overlap callback calls this before a run. ``nemo2 show --explain`` calls it on copies, to show the callback's effect.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

from nemo2.config.derivations import Setting
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_values, where_set
from nemo2.config.walk import class_of
from nemo2.overlap.facts import facts_of_run, settings_of_run
from nemo2.overlap.rules import ONE_BUCKET, decide, ineffective
from nemo2.overlap.settings import (
    CALLBACK,
    DDP_FIELDS,
    MODEL_FIELDS,
    OPTIMIZER_FIELDS,
    SWITCH_FIELDS,
    Decision,
)
from nemo2.overlap.tp_switches import left_out
from nemo2.parallel.layout import Layout


def overlap(
    callbacks: Sequence[Any],
    *,
    layout: Layout,
    world_size: int,
    model_config: Any,
    optimizer_config: Any,
    ddp_config: Any,
    data_sampler: Any,
    gpu: Optional[str],
    transformer_engine_missing: Optional[str],
    output_layer_can_fuse: bool = True,
    say: Optional[Callable[..., None]] = None,
) -> dict[str, Decision]:
    """Decide which communication overlaps, and write the decisions into the three configurations.

    Args:
        callbacks: Overlap callbacks. Several count as one.
        say: A logger's method, called for settings that have no effect.

    Raises:
        ConfigError: settings contradict each other.
    """
    configs = {"model_config": model_config, "optimizer_config": optimizer_config, "ddp_config": ddp_config}
    facts = facts_of_run(
        layout=layout,
        world_size=world_size,
        model_config=model_config,
        optimizer_config=optimizer_config,
        ddp_config=ddp_config,
        data_sampler=data_sampler,
        gpu=gpu,
        transformer_engine_missing=transformer_engine_missing,
        output_layer_can_fuse=output_layer_can_fuse,
    )
    requested = settings_of_run(callbacks, **configs)
    decisions = decide(facts, requested)
    if say is not None:
        for setting, used in ineffective(decisions, requested):
            say("%s does not take effect. The run uses %s: %s.", setting.place, used.value, used.reason)
        if decisions["tp_comm_overlap"].value:
            for sentence in left_out(decisions["tp_comm_overlap_cfg"].value):
                say("%s", sentence)
    for target, names in zip(
        configs.values(), ((*MODEL_FIELDS, *SWITCH_FIELDS), OPTIMIZER_FIELDS, DDP_FIELDS), strict=True
    ):
        for name in names:
            if name in decisions and hasattr(target, name):
                adjust(target, name, decisions[name].value, why=f"{CALLBACK}: {decisions[name].reason}")
    return decisions


def leave_one_bucket(ddp_config: Any, *, say: Optional[Callable[..., None]] = None) -> None:
    """Repeat Megatron-Core's change of ``bucket_size`` for buffers whose reduction isn't overlapped. ``say`` reports
    an explicit value that this overrides."""
    if ddp_config.overlap_grad_reduce or ddp_config.use_megatron_fsdp or ddp_config.bucket_size is None:
        return
    requested = explicit_values(ddp_config).get("bucket_size")
    if say is not None and requested is not None and requested == ddp_config.bucket_size:
        line = where_set(ddp_config, "bucket_size")
        setting = Setting("bucket_size", "strategy.ddp_config", requested, line)
        say("%s does not take effect: %s.", setting, ONE_BUCKET)
    adjust(ddp_config, "bucket_size", None, why=ONE_BUCKET)


def overlap_callbacks(callbacks: Optional[Iterable[Any]]) -> list[Any]:
    """The overlap callbacks of a trainer, as configs or live objects."""
    return [callback for callback in callbacks or () if getattr(class_of(callback), "asks_for_overlap", False)]
