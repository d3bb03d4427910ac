# SPDX-License-Identifier: Apache-2.0
"""Writes the decisions of the overlap rules into a run's configurations.

The overlap callback calls this before a run. ``nemo2 show --explain`` calls it on copies, to show the callback's effect.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from nemo2.config.derivations import Setting
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_values, where_set
from nemo2.config.walk import class_of
from nemo2.errors import ConfigError
from nemo2.mcore.overlap.rules import GATHER_AHEAD, ONE_BUCKET, Requested, decide, ineffective
from nemo2.mcore.overlap.settings import CALLBACK, Decision, OverlapFacts
from nemo2.mcore.overlap.tp_switches import SWITCHES, left_out
from nemo2.mcore.overlap.userbuffer_limits import without_buffers
from nemo2.mcore.parallel.layout import Layout

FIELDS = {
    "strategy.ddp_config": ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size"),
    "optim.config": ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
    "model.config": (
        "tp_comm_overlap",
        "tp_comm_overlap_cfg",
        "tp_comm_bootstrap_backend",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
    ),
}
"""The callback's arguments by the configurations that have a field of the name."""
CALLBACK_FIELDS = tuple(dict.fromkeys(name for names in FIELDS.values() for name in names))
_OTHER_FIELDS = ("num_buckets", "use_distributed_optimizer", *SWITCHES)
"""Fields of the configurations that are no arguments of the callback, but contradict or decide some."""


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

    A configuration of None means that the run has no such Megatron-Core configuration. ``gpu``,
    ``transformer_engine_missing`` and ``output_layer_can_fuse`` describe the machine that trains, a
    `nemo2.mcore.settle.Machine`.

    Args:
        callbacks: Overlap callbacks. Several count as one.
        say: A logger's method, called for settings that have no effect.

    Raises:
        ConfigError: settings contradict each other.
    """
    configs = {"strategy.ddp_config": ddp_config, "optim.config": optimizer_config, "model.config": model_config}
    fused = bool(getattr(model_config, "gradient_accumulation_fusion", False))
    # Without a setting, Transformer Engine's attention uses a ring, and plain attention gathers.
    messages = "p2p" if transformer_engine_missing is None else "all_gather"
    facts = OverlapFacts(
        layout=layout,
        gradient_ranks=max(1, world_size // (layout.tp * layout.pp)),
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
    requested = settings_of_run(callbacks, configs)
    decisions = decide(facts, requested)
    if say is not None:
        for setting, used in ineffective(decisions, requested):
            say("%s does not take effect. The run uses %s: %s.", setting.place, used.value, used.reason)
        if decisions["tp_comm_overlap"].value:
            for sentence in left_out(decisions["tp_comm_overlap_cfg"].value):
                say("%s", sentence)
    for path, config in configs.items():
        for name in (*FIELDS[path], *SWITCHES):
            if name in decisions and hasattr(config, name):
                adjust(config, name, decisions[name].value, why=f"{CALLBACK}: {decisions[name].reason}")
    return decisions


def leave_one_bucket(ddp_config: Any, *, say: Optional[Callable[..., None]] = None) -> None:
    """Repeat Megatron-Core's change of ``bucket_size`` for buffers whose reduction isn't overlapped. ``say`` reports
    an explicit value that this overrides.

    Raises:
        ConfigError: the user set ``overlap_param_gather``, which needs several buckets.
    """
    if ddp_config.overlap_grad_reduce or ddp_config.use_megatron_fsdp:
        return
    owner, reduced = "strategy.ddp_config", "overlap_grad_reduce"
    in_force = Setting(reduced, owner, False, where_set(ddp_config, reduced))
    settings = [*_settings(ddp_config, owner, ("overlap_param_gather",)), in_force]
    if ddp_config.overlap_param_gather and (problem := GATHER_AHEAD.problem(Requested(settings, Layout()))):
        raise ConfigError(problem, rule=GATHER_AHEAD.rule)
    if ddp_config.bucket_size is None:
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


def settings_of_run(callbacks: Iterable[Any], configs: Mapping[str, Any]) -> list[Setting]:
    """The user's settings: the callbacks' arguments first, then the explicit fields of the configurations,
    which are named by their paths in a recipe.

    None is not a setting: Megatron-Core decides such a field.
    """
    settings = [setting for callback in callbacks for setting in _settings(callback, CALLBACK, CALLBACK_FIELDS)]
    for path, config in configs.items():
        settings += _settings(config, path, (*FIELDS[path], *_OTHER_FIELDS))
    return settings


def _of_megatron_fsdp(ddp_config: Any) -> dict[str, Any]:
    if not getattr(ddp_config, "use_megatron_fsdp", False):
        return {}
    from nemo2.mcore.parallel.fsdp import always_overlapped, not_overlapped

    sharding = ddp_config.data_parallel_sharding_strategy
    return {"always_overlapped": always_overlapped(sharding), "not_overlapped": not_overlapped(sharding)}


def _settings(target: Any, owner: str, names: tuple[str, ...]) -> Iterator[Setting]:
    if target is None:
        return
    values = explicit_values(target)
    for name in names:
        if values.get(name) is not None:
            yield Setting(name, owner, values[name], where_set(target, name))
