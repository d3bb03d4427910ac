# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong with a recipe before anything runs: every broken rule at once, with its arithmetic.

The rules read the configured tree; nothing is built, no process group exists, no file is opened but to see that it is there.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from nemo2.errors import ConfigError
from nemo2.parallel.layout import Layout

Rule = Callable[["Facts"], Iterator[str]]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at, read off a recipe. None: the recipe doesn't say, and rules about it stay silent."""

    recipe: Any
    layout: Layout
    world_size: int
    nodes: int
    devices: Optional[int]
    model: Any
    """The model's configuration node, e.g. of ``Llama3Config8B``."""
    seq_length: Optional[int]
    global_batch_size: Optional[int]
    micro_batch_size: Optional[int]

    def of_model(self, name: str) -> Any:
        """A field of the model's configuration with its default; None where it has none."""
        return getattr(self.model, name, None) if self.model is not None else None

    @property
    def data_parallel_size(self) -> Optional[int]:
        return (
            None if self.layout.world_problem(self.world_size) else self.world_size // self.layout.model_parallel_size
        )


def check_recipe(
    recipe: Any,
    *,
    devices: Optional[int] = None,
    nodes: Optional[int] = None,
    local: bool = False,
    chosen: bool = True,
) -> None:
    """Refuse a recipe that can't run, before it is launched.

    Args:
        recipe: A configured call of ``llm.pretrain`` or its like.
        devices: Processes per node that will be launched. None: the trainer's.
        nodes: Nodes that will be launched. None: the trainer's.
        local: It will run on this machine: its files and devices are looked at too.
        chosen: Somebody asked for ``devices`` on this machine. False: they are the recipe's, laid out for another one.

    Raises:
        ConfigError: with all broken rules, one paragraph each.
    """
    problems = find_problems(recipe, devices=devices, nodes=nodes, local=local, chosen=chosen)
    if problems:
        raise ConfigError("\n".join(problems))


def find_problems(
    recipe: Any,
    *,
    devices: Optional[int] = None,
    nodes: Optional[int] = None,
    local: bool = False,
    chosen: bool = True,
) -> list[str]:
    """All broken rules, as `check_recipe` would raise them; empty if there are none."""
    from nemo2.config.checks import problems as unserialisable

    found = list(unserialisable(recipe))
    trainer = getattr(recipe, "trainer", None)
    if trainer is None:
        return found
    found += _launch_problems(trainer, devices=devices, nodes=nodes, local=local)
    if local and not chosen:
        found += _too_many_for_this_machine(devices)
    try:
        facts = _facts(recipe, trainer, devices=devices, nodes=nodes)
    except ConfigError as error:
        return [*found, str(error)]
    if facts is not None:
        for rule in RULES:
            found += rule(facts)
    if local:
        found += _file_problems(recipe)
    return found


def _facts(recipe: Any, trainer: Any, *, devices: Optional[int], nodes: Optional[int]) -> Optional[Facts]:
    strategy: Any = getattr(trainer, "strategy", None)
    if not hasattr(strategy, "tensor_model_parallel_size"):
        return None
    layout = Layout(
        tp=strategy.tensor_model_parallel_size,
        pp=strategy.pipeline_model_parallel_size,
        vp=strategy.virtual_pipeline_model_parallel_size,
        cp=strategy.context_parallel_size,
        ep=strategy.expert_model_parallel_size,
        etp=strategy.expert_tensor_parallel_size,
        sp=bool(strategy.sequence_parallel),
    )
    nodes = nodes or _number(trainer, "num_nodes") or 1
    devices = devices or _number(trainer, "devices")
    data = getattr(recipe, "data", None)
    return Facts(
        recipe=recipe,
        layout=layout,
        world_size=nodes * (devices or layout.model_parallel_size),
        nodes=nodes,
        devices=devices,
        model=getattr(getattr(recipe, "model", None), "config", None),
        seq_length=_number(data, "seq_length"),
        global_batch_size=_number(data, "global_batch_size"),
        micro_batch_size=_number(data, "micro_batch_size"),
    )


# ---------------------------------------------------------------------------------------------------------------- rules


def _world(facts: Facts) -> Iterator[str]:
    problem = facts.layout.world_problem(facts.world_size)
    if problem:
        yield f"trainer.num_nodes={facts.nodes}, trainer.devices={facts.devices}: {problem}"


def _sequence_parallel(facts: Facts) -> Iterator[str]:
    layout = facts.layout
    if layout.sp and layout.tp == 1:
        yield (
            "strategy.sequence_parallel=True with strategy.tensor_model_parallel_size=1: it cuts the sequence over the "
            "tensor-parallel ranks, and there is one. Set sequence_parallel=False, or raise the tensor size."
        )
    if layout.sp and facts.seq_length and facts.seq_length % (layout.tp * layout.cp):
        yield (
            f"data.seq_length={facts.seq_length} is not a multiple of tensor_model_parallel_size * context_parallel_size = "
            f"{layout.tp} * {layout.cp}, over which sequence parallelism cuts it; "
            f"nearest: {_nearest(facts.seq_length, layout.tp * layout.cp)}."
        )


def _context_parallel(facts: Facts) -> Iterator[str]:
    cp, seq = facts.layout.cp, facts.seq_length
    if cp > 1 and seq and seq % (2 * cp):
        yield (
            f"data.seq_length={seq} is not a multiple of 2 * context_parallel_size = {2 * cp}, into which each sequence is cut "
            f"for a balanced causal load; nearest: {_nearest(seq, 2 * cp)}."
        )


def _heads(facts: Facts) -> Iterator[str]:
    heads, groups, tp = facts.of_model("num_attention_heads"), facts.of_model("num_query_groups"), facts.layout.tp
    if not heads:
        return
    if heads % tp:
        yield (
            f"model.config.num_attention_heads={heads} is not a multiple of strategy.tensor_model_parallel_size={tp}; sizes that "
            f"divide it: {_divisors(heads)}."
        )
    if groups and heads % groups:
        yield f"model.config.num_attention_heads={heads} is not a multiple of model.config.num_query_groups={groups}."
    if groups and groups % tp and tp % groups:
        yield (
            f"model.config.num_query_groups={groups} is neither a multiple nor a divisor of "
            f"strategy.tensor_model_parallel_size={tp}; sizes that work: {_divisors(groups)}, or a multiple of {groups}."
        )
    hidden = facts.of_model("hidden_size")
    if hidden and hidden % heads and not facts.of_model("kv_channels"):
        yield f"model.config.hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and kv_channels is unset."


def _feed_forward(facts: Facts) -> Iterator[str]:
    ffn, tp = facts.of_model("ffn_hidden_size"), facts.layout.tp
    if ffn and ffn % tp:
        yield (
            f"model.config.ffn_hidden_size={ffn} is not a multiple of strategy.tensor_model_parallel_size={tp}; "
            f"nearest: {_nearest(ffn, tp)}."
        )


def _pipeline(facts: Facts) -> Iterator[str]:
    layout, strategy, layers = facts.layout, facts.recipe.trainer.strategy, facts.of_model("num_layers")
    if layout.vp and layout.vp > 1 and layout.pp == 1:
        yield (
            f"strategy.virtual_pipeline_model_parallel_size={layout.vp} with pipeline_model_parallel_size=1: virtual stages "
            "interleave the stages of a pipeline. Unset it, or raise the pipeline size to 2 or more."
        )
    if not layers or layout.pp == 1 or strategy.pipeline_model_parallel_layout is not None:
        return
    first, last = strategy.num_layers_in_first_pipeline_stage, strategy.num_layers_in_last_pipeline_stage
    uneven = [size for size in (first, last) if size is not None]
    stages = layout.pp - len(uneven)
    counted = layers - sum(uneven)
    extra = int(bool(strategy.account_for_embedding_in_pipeline_split))
    extra += int(bool(strategy.account_for_loss_in_pipeline_split))
    if counted < 0 or (stages and counted + extra < stages):
        yield (
            f"model.config.num_layers={layers} leaves {counted} layers for {stages} pipeline stages beside the first and last "
            f"stage's {uneven}; use a smaller pipeline_model_parallel_size."
        )
        return
    if stages and (counted + extra) % stages:
        yield (
            f"model.config.num_layers={layers}{f' minus {sum(uneven)}' if uneven else ''}{f' plus {extra}' if extra else ''} = "
            f"{counted + extra} layers can't be cut evenly into {stages} pipeline stages; pipeline sizes that divide {layers}: "
            f"{_divisors(layers)}, or set num_layers_in_first_pipeline_stage / num_layers_in_last_pipeline_stage."
        )
    elif layout.vp and layout.vp > 1 and stages and ((counted + extra) // stages) % layout.vp:
        per_stage = (counted + extra) // stages
        yield (
            f"{per_stage} layers per pipeline stage can't be cut into strategy.virtual_pipeline_model_parallel_size={layout.vp} "
            f"chunks; sizes that divide them: {_divisors(per_stage)}."
        )


def _experts(facts: Facts) -> Iterator[str]:
    ep, experts = facts.layout.ep, facts.of_model("num_moe_experts")
    if ep > 1 and facts.model is not None and not experts:
        yield (
            f"strategy.expert_model_parallel_size={ep}: this model has no experts (model.config.num_moe_experts is unset). "
            "Set it to 1."
        )
    if experts and experts % ep:
        yield (
            f"model.config.num_moe_experts={experts} is not a multiple of strategy.expert_model_parallel_size={ep}; sizes that "
            f"divide it: {_divisors(experts)}."
        )
    topk = facts.of_model("moe_router_topk")
    if experts and topk and topk > experts:
        yield f"model.config.moe_router_topk={topk} is more than model.config.num_moe_experts={experts}."


def _batches(facts: Facts) -> Iterator[str]:
    gbs, mbs, dp = facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    for name, value in (("global_batch_size", gbs), ("micro_batch_size", mbs), ("seq_length", facts.seq_length)):
        if value is not None and value < 1:
            yield f"data.{name}={value}: must be at least 1."
            return
    if not gbs or not mbs or not dp:
        return
    if gbs % (mbs * dp):
        yield (
            f"data.global_batch_size={gbs} is not a multiple of data.micro_batch_size * data-parallel size = {mbs} * {dp} = "
            f"{mbs * dp}; nearest: {_nearest(gbs, mbs * dp)}."
        )
        return
    layout, num_microbatches = facts.layout, gbs // (mbs * dp)
    group = facts.recipe.trainer.strategy.microbatch_group_size_per_vp_stage or layout.pp
    if layout.pp > 1 and layout.vp and layout.vp > 1 and num_microbatches % group:
        yield (
            f"The interleaved schedule runs micro-batches in groups of {group}, and there are {num_microbatches} per step "
            f"(data.global_batch_size={gbs} / ({mbs} * {dp})); nearest global batch sizes: {_nearest(gbs, mbs * dp * group)}."
        )


def _sequence_lengths(facts: Facts) -> Iterator[str]:
    arguments = getattr(facts.model, "__arguments__", {})
    model, data = arguments.get("seq_length"), facts.seq_length
    if model and data and model != data:
        yield (
            f"model.config.seq_length={model} contradicts data.seq_length={data}: set it on the data only, and the model follows."
        )


RULES: tuple[Rule, ...] = (
    _world,
    _sequence_parallel,
    _context_parallel,
    _heads,
    _feed_forward,
    _pipeline,
    _experts,
    _batches,
    _sequence_lengths,
)


# ----------------------------------------------------------------------------------------------------- launch and files


def _launch_problems(trainer: Any, *, devices: Optional[int], nodes: Optional[int], local: bool) -> Iterator[str]:
    for name, launched in (("devices", devices), ("num_nodes", nodes)):
        asked = _number(trainer, name)
        if launched is not None and asked is not None and asked != launched:
            yield (
                f"trainer.{name}={asked}, and the executor starts {launched}: they must be equal. Set trainer.{name}={launched}, "
                f"or launch {asked}."
            )
    if local and devices is None:
        from nemo2.trainer import check_devices

        try:
            check_devices(
                accelerator=getattr(trainer, "accelerator", "auto"),
                devices=getattr(trainer, "devices", "auto"),
                num_nodes=_number(trainer, "num_nodes") or 1,
            )
        except ConfigError as error:
            yield str(error)


def _too_many_for_this_machine(devices: Optional[int]) -> Iterator[str]:
    import torch

    cores = os.cpu_count() or 1
    if devices is not None and devices > cores and not torch.cuda.is_available():
        yield (
            f"trainer.devices={devices}: this recipe is laid out for {devices} GPUs, and this machine has none, and {cores} CPU "
            f"core{'s' if cores > 1 else ''}. Run it where the GPUs are; to try a shrunken one here on CPU processes, say how "
            f"many (`--devices {min(2, cores)}`, or devices={min(2, cores)} in launch())."
        )


def _file_problems(recipe: Any) -> Iterator[str]:
    log = getattr(recipe, "log", None)
    for field in ("explicit_log_dir", "log_dir"):
        directory = getattr(log, field, None)
        if directory and not _writable(Path(str(directory)).expanduser()):
            yield f"log.{field}={directory}: this directory can't be written. Name one that this user may write to."
    resume = getattr(recipe, "resume", None)
    path = getattr(resume, "resume_from_path", None)
    if path and not Path(str(path)).is_dir():
        yield f"resume.resume_from_path={path}: no such checkpoint directory."


def _writable(path: Path) -> bool:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


# -------------------------------------------------------------------------------------------------------------- helpers


def _number(node: Any, name: str) -> Optional[int]:
    value = getattr(node, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _divisors(value: int, limit: int = 64) -> str:
    return ", ".join(str(size) for size in range(1, min(value, limit) + 1) if value % size == 0)
