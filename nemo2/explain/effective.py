# SPDX-License-Identifier: Apache-2.0
"""What a run would make of a recipe's settings, without running it.

The configurations are built and go through the code that a run puts them through (`nemo2.strategies.megatron_config.settle`
and the overlap callback's rules), so that what is shown here is what ``effective_config.yaml`` says at the first step.
Nothing that needs a device, a process group or a file is built.
"""

import contextlib
import contextvars
import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import fiddle as fdl

from nemo2.config.adjust import Adjustment, adjust, adjustments, forget, take_back
from nemo2.config.explicit import explicit_fields, explicit_values, note_explicit_fields
from nemo2.errors import ConfigError
from nemo2.overlap.settings import Decision
from nemo2.settle.machine import Machine
from nemo2.settle.world import world_of


@dataclass(frozen=True, kw_only=True)
class Effective:
    """The settled configurations by their path in the recipe; what could not be settled is missing, ``refusals`` say why."""

    objects: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    """Of the overlap callback; empty where the recipe has none."""
    refusals: list[str] = field(default_factory=list)
    world_size: int = 1
    machine: str = ""
    """Which GPU, and how many ranks, this is about."""
    layout: str = ""

    def value(self, path: str, name: str) -> tuple[bool, Any]:
        """Whether ``path.name`` was settled, and its value."""
        owner = self.objects.get(path)
        return (True, getattr(owner, name)) if owner is not None and hasattr(owner, name) else (False, None)

    def steps(self, path: str, name: str) -> tuple[Adjustment, ...]:
        """What changed the field after it was built, oldest first."""
        return adjustments(self.objects.get(path)).get(name, ())


def settle_recipe(recipe: Any, machine: Machine) -> Effective:
    """The settings of ``recipe``, which is not changed, as its run would have them.

    Args:
        recipe: A configured call of ``llm.pretrain`` or its like.
        machine: Where it would run.
    """
    from nemo2.models.gpt import for_another_machine, unannounced

    found = Effective()
    strategy_node = getattr(getattr(recipe, "trainer", None), "strategy", None)
    precision_at, precision = _precision_at(getattr(recipe.trainer, "plugins", None))
    elsewhere = not machine.local
    with contextlib.ExitStack() as stack:
        if elsewhere:
            stack.enter_context(for_another_machine())
            stack.enter_context(unannounced())  # what this machine decides is not what is asked about
        parts = {
            "trainer.strategy": _build(strategy_node, found, "trainer.strategy"),
            "trainer.plugins": _build(precision, found, precision_at),
            "model.config": _build_model(getattr(recipe.model, "config", None), found, elsewhere=elsewhere),
            "optim.config": _build_optimizer(_at(recipe, "optim", "config"), found, elsewhere=elsewhere),
        }
        strategy: Any = parts["trainer.strategy"]
        if elsewhere:
            _ask_for_graphs_again(parts["model.config"])
        if strategy is not None and hasattr(strategy, "ddp_config"):
            found = _settled(recipe, parts, found, machine, precision_at)
            if elsewhere:
                _put_back(parts["model.config"], found.decisions)
    return found


def _settled(
    recipe: Any,
    parts: dict[str, Any],
    found: Effective,
    machine: Machine,
    precision_at: str,
) -> Effective:
    from nemo2.overlap.apply import leave_one_bucket, overlap, overlap_callbacks
    from nemo2.strategies.megatron_config import settle

    strategy, config, optimizer = parts["trainer.strategy"], parts["model.config"], parts["optim.config"]
    precision = parts["trainer.plugins"]
    seq_length = getattr(recipe.data, "seq_length", None)
    if seq_length and hasattr(config, "seq_length") and "seq_length" not in explicit_fields(config):
        adjust(config, "seq_length", seq_length, why="data.seq_length")
    world = world_of(recipe, machine).size
    decisions: dict[str, Decision] = {}
    try:
        settle(
            ddp_config=strategy.ddp_config,
            explicit_ddp=strategy.explicit_ddp_fields
            | ({"use_distributed_optimizer"} if getattr(strategy, "fsdp", None) else set()),
            optimizer_config=optimizer,
            model_config=config,
            precision=precision,
            parallelism=strategy.parallelism,
            layout=strategy.layout,
        )
        asking = overlap_callbacks(getattr(recipe.trainer, "callbacks", None))
        built = (_build(node, found, "trainer.callbacks") for node in asking)
        callbacks = [callback for callback in built if callback is not None]
        if callbacks:
            decisions = overlap(
                callbacks,
                layout=strategy.layout,
                world_size=world,
                model_config=config,
                optimizer_config=optimizer,
                ddp_config=strategy.ddp_config,
                data_sampler=SimpleNamespace(
                    seq_len=seq_length, micro_batch_size=getattr(recipe.data, "micro_batch_size", None)
                ),
                gpu=machine.model,
                transformer_engine_missing=machine.te_missing,
                output_layer_can_fuse=machine.output_layer_can_fuse,
            )
        leave_one_bucket(strategy.ddp_config)
    except ConfigError as error:
        found.refusals.append(str(error))
    objects = {
        "trainer.strategy": strategy.parallelism,
        "trainer.strategy.ddp": strategy.ddp_config,
        "optim.config": optimizer,
        "model.config": config,
        precision_at: getattr(precision, "dtype_config", None),
    }
    return Effective(
        objects={path: value for path, value in objects.items() if value is not None},
        decisions=decisions,
        refusals=found.refusals,
        world_size=world,
        machine=machine.describe(),
        layout=strategy.layout.describe(),
    )


def _build(node: Any, found: Effective, path: str) -> Any:
    """The object of a config; copies of live ones, so that settling them does not reach the recipe."""
    if node is None:
        return None
    try:
        return fdl.build(node) if isinstance(node, fdl.Buildable) else copy.deepcopy(node)
    except Exception as error:  # a constructor may refuse its arguments with anything, fiddle adds the path
        found.refusals.append(f"{path}: {str(error).splitlines()[0]}")
        return None


def _build_model(node: Any, found: Effective, *, elsewhere: bool) -> Any:
    """Megatron-Core refuses fused kernels where Transformer Engine is missing, which says nothing of another machine: the
    configuration is built without them, and `_put_back` puts them back."""
    refused = Effective()
    built = _build(node, refused, "model.config")
    if built is not None or not elsewhere:
        found.refusals.extend(refused.refusals)
        return built
    return contextvars.Context().run(_build, node, found, "model.config")


def _ask_for_graphs_again(config: Any) -> None:
    """Other settings follow from CUDA graphs, which this machine has turned off: before they are settled."""
    if getattr(config, "adjustments", {}).pop("cuda_graph_impl", None) is not None:
        take_back(config, "cuda_graph_impl")


def _put_back(config: Any, decisions: dict[str, Decision]) -> None:
    """What was asked for in place of what this machine can do, where another one will run it."""
    for name, (asked, *_) in getattr(config, "adjustments", {}).items():
        if name not in decisions:
            setattr(config, name, asked)
            forget(config, name)


def _build_optimizer(node: Any, found: Effective, *, elsewhere: bool) -> Any:
    """Megatron-Core refuses low-precision states where Transformer Engine is missing, which says nothing of another machine."""
    if not elsewhere or not isinstance(node, fdl.Buildable) or not node.use_precision_aware_optimizer:
        return _build(node, found, "optim.config")
    node = copy.deepcopy(node)
    names = (
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
    )
    kept = {name: node.__arguments__[name] for name in names if name in node.__arguments__}
    for name in kept:
        delattr(node, name)
    built = _build(node, found, "optim.config")
    if built is not None:
        for name, value in kept.items():
            setattr(built, name, value)
        note_explicit_fields(built, {**explicit_values(built), **kept})
    return built


def _precision_at(plugins: Any) -> tuple[str, Any]:
    """The precision among a trainer's plugins, one or a list of them, configured or live, and its path."""
    from nemo2.precision import MegatronMixedPrecision

    several = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
    for index, one in enumerate(several):
        if isinstance(one, MegatronMixedPrecision):
            return (f"trainer.plugins[{index}]" if isinstance(plugins, list | tuple) else "trainer.plugins"), one
    return "trainer.plugins", None


def _at(node: Any, *names: str) -> Any:
    for name in names:
        node = getattr(node, name, None)
    return node
