# SPDX-License-Identifier: Apache-2.0
"""`settle`: works out a recipe's settings on a machine, as its run has them, without running it.

A strategy calls `settle_run` on live configurations when it is connected to a model. `settle` first builds the
configurations of a recipe and also applies the overlap callback's rules. Its result therefore equals
``effective_config.yaml`` at the first step. Neither function changes its arguments. Both return settled copies with a
note on each changed field (`nemo2.config.provenance`), and the run's refusals.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import fiddle as fdl
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.backend.te_version import megatron_finds
from nemo2.base.errors import ConfigError
from nemo2.config.derivations import apply
from nemo2.config.provenance import Step, adjust_to, adjusting, adjustments
from nemo2.config.walk import callbacks_of
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle import rows
from nemo2.mcore.settle.agreement import follow_the_data, length_problem
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.parts import Parts, Refusal, build_parts, quietly, refusals_of
from nemo2.mcore.settle.run_settings import DDP, MODEL, OVERLAP_RULE, PLUGINS, RunSettings, overlap_callbacks
from nemo2.mcore.settle.world import World, world_of

if TYPE_CHECKING:
    from nemo2.mcore.settle.overlap import Decision


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The settled form of a recipe on a machine.

    Attributes:
        machine: the machine.
        layout: the parallel sizes.
        objects: the settled configurations by their path in the recipe. Those that failed are missing, and ``refusals``
            say why.
        decisions: the overlap callback's decisions. Empty without the callback.
        machine_decides: fields of the model that the machine restricts, with the value in use and the reason.
        refusals: what the run would refuse. Empty: nothing.
        world: the world. None: the trainer asks for no number of devices.
    """

    machine: Machine
    layout: Layout
    objects: Mapping[str, Any] = field(default_factory=dict)
    decisions: "Mapping[str, Decision]" = field(default_factory=dict)
    machine_decides: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    world: Optional[World] = None

    @property
    def messages(self) -> list[str]:
        """The messages of the refusals, each once."""
        return list(dict.fromkeys(refusal.sentence for refusal in self.refusals))

    def refused(self, rule: str) -> list[str]:
        """The messages of the refusals of the rule called ``rule``."""
        return list(dict.fromkeys(refusal.sentence for refusal in self.refusals if refusal.rule == rule))

    def value(self, path: str, name: str) -> tuple[bool, Any]:
        """Whether ``path.name`` was settled, and its value."""
        owner = self.objects.get(path)
        return (True, getattr(owner, name)) if owner is not None and hasattr(owner, name) else (False, None)

    def steps(self, path: str, name: str) -> tuple[Step, ...]:
        """The changes of a field after it was built, oldest first."""
        return adjustments(self.objects.get(path)).get(name, ())

    def apply(self, run: RunSettings) -> None:
        """Write the settled values into the live configurations of ``run``, in place, because other objects hold them.

        Raises:
            ConfigError: the run is refused.
        """
        if self.refusals:
            first = self.refusals[0]
            raise ConfigError("\n".join(self.messages), rule=first.rule) from first.cause
        for path, live in run.objects().items():
            vars(live).update(vars(self.objects[path]))


def settle(recipe: Any, machine: Machine, *, parts: Optional[Parts] = None, layout: Optional[Layout] = None) -> Settled:
    """Work out the settings of ``recipe`` on ``machine``, as its run has them. The recipe is not changed.

    Args:
        recipe: A configured call of ``llm.pretrain`` or a similar function.
        machine: The machine of the run.
        parts: The recipe's parts, if they are already built.
        layout: Replaces the strategy's own layout.
    """
    parts = parts or build_parts(recipe, machine)
    strategy: Any = parts.get("trainer.strategy")
    refusals = list(parts.refusals)
    if problem := length_problem(parts.get("model.config"), getattr(recipe, "data", None)):
        refusals.append(Refusal("one-sequence-length", problem))
    world = None
    try:
        world = world_of(recipe, machine)
    except ConfigError as error:
        refusals.append(Refusal("nodes-and-devices-are-counts", str(error), "trainer.devices"))
    if getattr(strategy, "sharded_by_torch", False):
        run = RunSettings(
            parallelism=strategy.parallelism,
            optimizer_config=parts.get("optim.config"),
            model_config=_following_the_data(parts.get("model.config"), getattr(recipe, "data", None)),
            precision=parts.get("trainer.plugins"),
        )
        with quietly():
            settled = settle_sharded(run, machine, strategy=type(strategy))
        objects = {path: one for path, one in settled.objects.items() if path != "trainer.strategy"}
        return replace(
            settled,
            layout=strategy.layout,
            objects=_named_as_in_the_recipe(objects, parts),
            refusals=(*refusals, *settled.refusals),
            world=world,
        )
    if strategy is None or not hasattr(strategy, "ddp_config"):
        return Settled(machine=machine, layout=layout or Layout(), refusals=tuple(refusals), world=world)
    sizes: Layout = layout or strategy.layout
    parallelism = copy.copy(strategy.parallelism)  # with its record of explicit fields
    vars(parallelism).update(sizes.fields())
    run = RunSettings(
        parallelism=parallelism,
        ddp_config=strategy.ddp_config,
        optimizer_config=parts.get("optim.config"),
        model_config=_following_the_data(parts.get("model.config"), getattr(recipe, "data", None)),
        precision=parts.get("trainer.plugins"),
    )
    with quietly():
        settled, attempts = settle_run(run, machine), _Attempts()
        size = world.size if world is not None else sizes.model_parallel_size
        decisions = None
        if not settled.refused("one-switch-for-the-distributed-optimizer"):  # else the callback would tell it again
            decisions = attempts.attempt(OVERLAP_RULE, lambda: _decide(recipe, settled, size, attempts))
        # The callback repeats the conflicts that need no callback.
        attempts.refusals = [
            one for one in attempts.refusals if one.rule == OVERLAP_RULE or not settled.refused(one.rule)
        ]
        attempts.refusals += _uncarried(settled.objects.get("model.config"), getattr(recipe, "data", None), machine)
    return replace(
        settled,
        objects=_named_as_in_the_recipe(settled.objects, parts),
        decisions=decisions or {},
        refusals=(*refusals, *settled.refusals, *attempts.refusals),
        world=world,
    )


def _named_as_in_the_recipe(objects: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """The settled objects with the precision at its path in the recipe."""
    return {parts.precision_at if path == PLUGINS else path: one for path, one in objects.items()}


def settle_sharded(run: RunSettings, machine: Machine, *, strategy: type) -> Settled:
    """As `settle_run`, for the run of a ``strategy`` that lets torch shard the model: it has no gradient buffers of
    Megatron-Core's."""
    attempts, run = _Attempts(), run.copied(machine)
    model, changed = _adjusted_model(run)
    if attempts.attempt("one-precision", lambda: _apply_precision(run) or True) and model is not None:
        if attempts.attempt("sizes-on-the-strategy", lambda: apply(rows.sizes_beyond(strategy), run) or True):
            attempts.attempt("megatron-core-agrees", lambda: write_parallelism(run))
        apply(rows.without_gradient_buffers(strategy.__name__), run)
    return attempts.settled(run, changed)


def settle_run(run: RunSettings, machine: Machine) -> Settled:
    """Settle copies of the configurations of a run, in the steps that a strategy applies when it connects."""
    attempts, again = _Attempts(), run.copied(machine)
    run = run.copied(machine)
    model, changed = _adjusted_model(run)
    if run.optimizer_config is not None:
        attempts.attempt("one-switch-for-the-distributed-optimizer", lambda: apply(rows.OPTIMIZER, run))
    if machine.accelerator == "cpu":
        apply(rows.ON_CPU, run)
    if model is not None:
        attempts.attempt("fp32-sums-are-of-one-optimizers-shards", lambda: apply(rows.REDUCTION, run))
    in_agreement = attempts.attempt("one-precision", lambda: _apply_precision(run) or True)
    attempts.attempt("scales-go-into-the-checkpoint", lambda: apply(rows.MEGATRON_FSDP, run))
    if in_agreement:
        attempts.attempt("graphs-go-with-the-rest", lambda: apply(rows.GRAPHS, run))
    elif model is not None:
        # Megatron-Core's errors about the model are wanted all the same.
        model, precision = again.model_config, again.precision
        adjust_to(model, machine.overrides)
        if _Attempts().attempt("one-precision", lambda: precision.apply_to(model, path=MODEL) or True) is None:
            model = None
    if model is not None:
        finished = replace(run, model_config=model)
        attempts.attempt("megatron-core-agrees", lambda: _finish(finished))
        changed = {name: value for name, value in changed.items() if getattr(model, name) == value[0]}
    return attempts.settled(run, changed)


def write_parallelism(run: RunSettings) -> None:
    """Write the strategy's sizes into the model's configuration, so that both agree. Settings that the machine doesn't
    support are left out, and Megatron-Core derives the rest.

    Raises:
        ConfigError: the user set the model's own field to another value, or Megatron-Core rejects the result.
    """
    config, machine = run.model_config, run.machine
    apply(rows.SIZES, run)
    adjust_to(config, machine.overrides)
    # Run Megatron-Core's derivations and checks again, for the new sizes.
    try:
        with (
            megatron_finds(machine.transformer_engine),
            adjusting(config, why="derived by Megatron-Core from the other fields"),
        ):
            if kind_of(config) == "none" and hasattr(config, "inference_cuda_graph_scope"):
                config.inference_cuda_graph_scope = None  # derived from graphs that the machine may have turned off
            config.__post_init__()
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"Megatron-Core rejects this model with this layout ({run.layout.describe()}): {error}"
        ) from error


class _Attempts:
    """Run steps that may fail, each separately."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []

    def attempt(self, rule: str, step: Callable[[], Any]) -> Any:
        """The result of ``step``, or None if it fails. The refusal is recorded under the error's rule, or else under
        ``rule``."""
        try:
            return step()
        except Exception as error:  # Megatron-Core asserts, raises ValueError, TypeError ...: all say that it won't do
            self.refusals += refusals_of(error, rule)
            return None

    def settled(self, run: RunSettings, machine_decides: Mapping[str, tuple[Any, str]]) -> Settled:
        """The result for ``run``, with the refusals of all attempts."""
        return Settled(
            machine=run.machine,
            layout=run.layout,
            objects=run.objects(),
            machine_decides=machine_decides,
            refusals=tuple(self.refusals),
        )


def _adjusted_model(run: RunSettings) -> tuple[TransformerConfig | None, dict[str, tuple[Any, str]]]:
    """The model's configuration without what the machine lacks, and the changes. None: it is not Megatron-Core's."""
    model = run.model_config if isinstance(run.model_config, TransformerConfig) else None
    return model, {} if model is None else adjust_to(model, run.machine.overrides)


def _apply_precision(run: RunSettings) -> None:
    if not isinstance(run.precision, MegatronMixedPrecision):
        return
    configs = {name: config for name, config in run.configs.items() if config is not None and name != PLUGINS}
    if not isinstance(run.model_config, TransformerConfig):
        configs.pop(MODEL, None)
    run.precision.apply_to_all(configs)
    apply(rows.LOSS_SCALING, run)


def _finish(run: RunSettings) -> None:
    """Set the sizes, apply Megatron-Core's derived values, and collect its errors about the layers of every chunk."""
    apply(rows.ACTIVATIONS, run)
    write_parallelism(run)
    apply(rows.LAYERS, run)
    if run.machine.transformer_engine is not None:
        from nemo2.mcore.settle.te_needs import refuse_an_older_transformer_engine

        refuse_an_older_transformer_engine(run.model_config, run.ddp_config, run.machine.transformer_engine)
    layers_per_chunk(run.model_config)  # its assertions go beyond the configuration's


def layers_per_chunk(config: Any) -> list[int]:
    """Megatron-Core's count of the layers of every chunk. Empty: the layout is written out, or the model is a hybrid.

    Args:
        config: A settled configuration of a model.

    Raises:
        AssertionError: the layers can't be split.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if config.pipeline_model_parallel_layout is not None or hasattr(config, "mamba_stack_spec"):
        return []
    chunks = config.virtual_pipeline_model_parallel_size
    return [
        get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
        for stage in range(config.pipeline_model_parallel_size)
        for chunk in (range(chunks) if chunks else (None,))
    ]


def _decide(recipe: Any, settled: Settled, world_size: int, attempts: _Attempts) -> "dict[str, Decision]":
    """Apply the overlap callback's decisions at setup, and Megatron-Core's when it makes the buffers."""
    objects, data = settled.objects, getattr(recipe, "data", None)
    run = RunSettings(
        parallelism=objects["trainer.strategy"],
        ddp_config=objects["trainer.strategy.ddp"],
        optimizer_config=objects.get("optim.config"),
        model_config=objects.get("model.config"),
        machine=settled.machine,
    )
    nodes = overlap_callbacks(callbacks_of(recipe.trainer))
    built = (
        attempts.attempt(OVERLAP_RULE, lambda one=one: fdl.build(one) if isinstance(one, fdl.Config) else one)
        for one in nodes
    )
    callbacks = [callback for callback in built if callback is not None]
    decisions = {}
    if callbacks:
        from nemo2.mcore.settle.overlap import overlap

        sampler = SimpleNamespace(
            seq_len=getattr(data, "seq_length", None), micro_batch_size=getattr(data, "micro_batch_size", None)
        )
        decisions = overlap(run, callbacks, world_size=world_size, data_sampler=sampler)
    leave_one_bucket(run)
    return decisions


def leave_one_bucket(run: RunSettings, *, say: Optional[Callable[..., None]] = None) -> None:
    """Settle the buckets, after the overlap callback. ``say`` reports an explicit size that this overrides.

    Raises:
        ConfigError: the user set ``overlap_param_gather``, which needs several buckets.
    """
    size = f"{DDP}.bucket_size"
    requested = run.requested(size)
    apply(rows.BUCKETS, run)
    if say is not None and requested is not None and run[size] is None:
        say("%s does not take effect: %s.", requested, rows.ONE_BUCKET)


def _uncarried(model: Any, data: Any, machine: Machine) -> Iterator[Refusal]:
    """The errors with which userbuffers would fail to start, if the run uses them."""
    overlapped = getattr(model, "tp_comm_overlap", False) and model.sequence_parallel and machine.transformer_engine
    if not overlapped or model.tensor_model_parallel_size < 2:
        return
    from nemo2.mcore.overlap.userbuffer_limits import uncarried

    sizes = getattr(data, "seq_length", None), getattr(data, "micro_batch_size", None)
    counts = [size for size in sizes if isinstance(size, int)]
    tokens = math.prod(counts) // model.context_parallel_size if len(counts) == len(sizes) else None
    for rule, sentence in uncarried(model, version=str(machine.transformer_engine), tokens=tokens):
        yield Refusal(rule, sentence)


def _following_the_data(config: Any, data: Any) -> Any:
    if config is None or data is None:
        return config
    config = copy.copy(config)
    follow_the_data(config, data)
    return config
