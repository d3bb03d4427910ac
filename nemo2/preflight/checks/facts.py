# SPDX-License-Identifier: Apache-2.0
"""The facts of a recipe that the rules read, collected once."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Optional

from nemo2.base.backend import extras
from nemo2.base.counts import is_count
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.auto_resume import starts_from_weights
from nemo2.config.walk import callbacks_of, class_of, node_at
from nemo2.mcore.parallel.layout import LAYOUT_FIELDS, Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.parts import Parts, build_parts
from nemo2.mcore.settle.world import World, nodes_problem, world_of

if TYPE_CHECKING:
    from nemo2.mcore.settle.settling import Settled


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A recipe, its machine, and the objects that its settings make.

    None stands for a value that the recipe doesn't set or an object that could not be built. Rules about it find
    nothing.
    """

    recipe: Any
    layout: Layout
    """The strategy's layout, or that of one rank if `sizes` are not numbers."""
    sizes: Mapping[str, Any]
    """The parallel sizes as written, by their short names. Empty: the strategy isn't Megatron's."""
    nodes: int
    devices: Optional[int]
    """Processes per node. None: the trainer's value is not a number of devices."""
    world_size: int
    launched: tuple[Optional[int], Optional[int]] = (None, None)
    """Devices per node and nodes that the executor starts."""
    machine: Machine = field(default_factory=Machine)
    """The machine of the run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The known variables of its processes."""
    parts: Parts = field(default_factory=Parts)

    @property
    def here(self) -> bool:
        """Whether the run is on this machine."""
        return self.machine.local

    def at(self, path: str) -> Any:
        """The node or value of the recipe at a path ("optim.config.lr"). None: there is none."""
        return node_at(self.recipe, path)

    @property
    def trains(self) -> bool:
        """Whether the recipe is one of training."""
        return trains(self.recipe)

    @property
    def callbacks(self) -> list[tuple[str, Any]]:
        """The trainer's callbacks, nodes and live objects, each with its path."""
        path, callbacks = "trainer.callbacks", callbacks_of(self.trainer)
        if isinstance(self.at(path), list | tuple):
            return [(f"{path}[{index}]", callback) for index, callback in enumerate(callbacks)]
        return [(path, one) for one in callbacks]

    @property
    def trainer(self) -> Any:
        return self.recipe.trainer

    @property
    def strategy(self) -> Any:
        return self.recipe.trainer.strategy

    @property
    def data(self) -> Any:
        return self.at("data")

    @property
    def model(self) -> Any:
        """The node of the model's configuration."""
        return self.at("model.config")

    @property
    def has_layout(self) -> bool:
        """Whether `layout` is the strategy's. Lightning's own strategies have none."""
        return bool(self.sizes) or getattr(class_of(self.strategy), "sharded_by_torch", False)

    @property
    def validates(self) -> bool:
        """Whether the run validates with whole global batches. A reduction of the user's own may keep the last samples."""
        model = self.at("model.__fn_or_cls__")
        reductions = [getattr(model, f"{stage}loss_reduction", None) for stage in ("validation_", "")]
        own = any(not (one.__module__ or "").startswith("nemo2.") for one in reductions if inspect.isfunction(one))
        return getattr(self.trainer, "limit_val_batches", None) != 0 and not own

    @property
    def lacks_weights(self) -> bool:
        """Whether this is a run of `llm.finetune` that names no weights to start from."""
        # "peft" is a parameter of llm.finetune only.
        parameters = getattr(self.at("__signature_info__"), "parameters", {})
        return "peft" in parameters and not starts_from_weights(self.at("resume"), self.strategy)

    @property
    def config(self) -> Optional[Any]:
        """The model's configuration with derived values, as requested. Parallel sizes are not written yet."""
        return self.parts.get("model.config")

    @property
    def written_config(self) -> Any:
        """`config`, or `model` where it could not be built."""
        return self.model if self.config is None else self.config

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is a stack with Mamba layers."""
        return hasattr(self.model, "mamba_stack_spec")

    @cached_property
    def hybrid_layers(self) -> str:
        """The letters of a hybrid's layers, with those of additional predictions. Empty: another model, or its pattern is
        refused."""
        from nemo2.models.hybrid_pattern import hybrid_pattern

        try:
            pattern = hybrid_pattern(self.written_config)
        except ConfigError:
            return ""
        return "".join([pattern.decoder, *pattern.further]) if pattern is not None else ""

    @property
    def has_plain_mlps(self) -> bool:
        """Whether a layer has a plain MLP: by the pattern of a hybrid, or else by ``moe_layer_freq``, which hybrids don't
        read."""
        if self.is_hybrid:
            return "-" in self.hybrid_layers
        pattern = self.of_model("moe_layer_freq")
        has_only_experts = pattern == 1 or (isinstance(pattern, list) and all(pattern))
        return not (self.of_model("num_moe_experts") and has_only_experts)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return bool(self.of_model("num_moe_experts")) and (not self.is_hybrid or "E" in self.hybrid_layers)

    @property
    def has_mamba_kernels(self) -> bool:
        """Whether this machine has the kernels of Mamba layers."""
        return bool(self.machine.transformer_engine and extras.has("mamba_ssm") and extras.has("causal_conv1d"))

    @property
    def packed(self) -> bool:
        """Whether rows hold several samples."""
        return bool(getattr(self.parts.get("data"), "packed", False))

    @cached_property
    def sized_config(self) -> Optional[Any]:
        """`config` with the sizes of `layout`."""
        if self.config is None:
            return None
        config = copy.copy(self.config)
        for name, value in self.layout.fields().items():
            setattr(config, name, value)
        return config

    def of_layers(self, rule: Callable[[Any], Iterable[str]]) -> Iterable[str]:
        """What a rule of `nemo2.models.layers.rules` says of the model in this layout."""
        return () if self.sized_config is None else rule(self.sized_config)

    @property
    def precision(self) -> Optional[Any]:
        """The fields of the precision plugin, a ``DtypeConfig``."""
        return getattr(self.parts.get("trainer.plugins"), "dtype_config", None)

    @property
    def ddp(self) -> Optional[Any]:
        return getattr(self.parts.get("trainer.strategy"), "ddp_config", None)

    def of_model(self, name: str, default: Any = None) -> Any:
        """A field of the model's configuration, including derived values. `default`: there is no such field."""
        value = getattr(self.written_config, name, None)
        if value is None and self.config is None and self.model is not None:
            value = _derived(self.model, name)
        return default if value is None else value

    def of_optimizer(self, name: str, default: Any = None) -> Any:
        """A field of the optimizer's configuration, read from the recipe, because the configuration may fail to
        build on this machine."""
        value = self.at(f"optim.config.{name}")
        return default if value is None else value

    def of_strategy(self, name: str) -> Any:
        return getattr(self.strategy, name, None)

    @property
    def seq_length(self) -> Optional[int]:
        return number(self.data, "seq_length")

    @property
    def global_batch_size(self) -> Optional[int]:
        return number(self.data, "global_batch_size")

    @property
    def micro_batch_size(self) -> Optional[int]:
        return number(self.data, "micro_batch_size")

    @property
    def data_parallel_size(self) -> Optional[int]:
        """Replicas of the model. None: the layout doesn't fit the world."""
        if self.layout.world_problem(self.world_size):
            return None
        return self.world_size // self.layout.model_parallel_size

    @property
    def num_microbatches(self) -> Optional[int]:
        """Micro-batches of a replica per step. None: the batch can't be split."""
        gbs, mbs, dp = self.global_batch_size, self.micro_batch_size, self.data_parallel_size
        if not (is_count(gbs) and is_count(mbs) and dp):
            return None
        assert gbs is not None and mbs is not None
        return None if gbs % (mbs * dp) else gbs // (mbs * dp)

    @property
    def distributed_optimizer(self) -> bool:
        """Whether the optimizer's state is sharded."""
        settled, value = self.settled.value("optim.config", "use_distributed_optimizer")
        return bool(value if settled else self.of_optimizer("use_distributed_optimizer"))

    @cached_property
    def settled(self) -> "Settled":
        """The settled form of these settings under `layout`."""
        from nemo2.mcore.settle.settling import settle

        return settle(self.recipe, self.machine, parts=self.parts, layout=self.layout if self.sizes else None)


def read_facts(
    recipe: Any,
    *,
    devices: Optional[int] = None,
    nodes: Optional[int] = None,
    machine: Optional[Machine] = None,
    environment: Optional[Mapping[str, str]] = None,
) -> Facts:
    """The facts of a recipe with a trainer, on ``machine`` (None: GPUs of any kind).

    ``devices`` and ``nodes`` are the numbers that an executor starts, if it is known.
    """
    machine = machine or Machine()
    trainer = recipe.trainer
    strategy: Any = getattr(trainer, "strategy", None)
    sizes: dict[str, Any] = {}
    if hasattr(strategy, "tensor_model_parallel_size"):
        sizes = {short: getattr(strategy, name) for short, name in LAYOUT_FIELDS.items()}
        sizes["sp"] = bool(sizes["sp"])
    try:
        layout = Layout.of(strategy)
    except ConfigError:  # a rule reports it
        layout = Layout()
    try:
        world = world_of(trainer, machine)
        asked_nodes, asked_devices = world.nodes, world.devices
    except ConfigError:  # a rule reports it
        asked_nodes, asked_devices = 1 if nodes_problem(trainer.num_nodes) else trainer.num_nodes or 1, None
    world_nodes, world_devices = nodes or asked_nodes, devices or asked_devices
    return Facts(
        recipe=recipe,
        layout=layout,
        sizes=sizes,
        nodes=world_nodes,
        devices=world_devices,
        world_size=World(world_nodes, world_devices or layout.model_parallel_size).size,
        launched=(devices, nodes),
        machine=machine,
        environment=environment or {},
        parts=build_parts(recipe, machine),
    )


def number(node: Any, name: str) -> Optional[int]:
    """An integer field of a node. None: the field has another value."""
    value = getattr(node, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _derived(model: Any, name: str) -> Any:
    """The value that Megatron-Core would derive, for a configuration that it rejects."""
    heads, hidden = getattr(model, "num_attention_heads", None), getattr(model, "hidden_size", None)
    if name == "num_query_groups":
        return heads
    if name == "ffn_hidden_size" and is_count(hidden):
        return 4 * hidden
    return None


def trains(recipe: Any) -> bool:
    """Whether a recipe is one of training."""
    return getattr(class_of(recipe), "__name__", "") in ("pretrain", "finetune", "train")
