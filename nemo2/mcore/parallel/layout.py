# SPDX-License-Identifier: Apache-2.0
"""The sizes that distribute a model over ranks, and their arithmetic.

The world size is the product ``tp * cp * pp * dp`` for the dense layers and ``etp * ep * pp * expert_dp`` for the
experts (Megatron-Core ``parallel_state.initialize_model_parallel``). The user sets all sizes except ``dp``, which
follows from the world size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

from nemo2.base.counts import count_problems, counted, is_count
from nemo2.base.errors import ConfigError
from nemo2.config.aliases import NOT_HERE, register_elsewhere


class Size(NamedTuple):
    """A parallel size that a user sets, and its names. A new parallelism needs a row in `SIZES`, a field in
    `Layout`, its groups and its rules."""

    short: str
    """The name in `Layout`, and wherever sizes are drawn or listed."""
    name: str
    """The name of the field on the strategy and in Megatron-Core's configurations."""
    label: str
    """The name in a line of text: "TP 2"."""
    group: Optional[str]
    """The tensors that the ranks of a group share. None: the size has no group of ranks."""
    optional: bool = False
    """Whether the size may be None."""


SIZES = (
    Size("tp", "tensor_model_parallel_size", "TP", "tensor parallel"),
    Size("pp", "pipeline_model_parallel_size", "PP", "pipeline parallel"),
    Size("vp", "virtual_pipeline_model_parallel_size", "VP", None, optional=True),
    Size("cp", "context_parallel_size", "CP", "context parallel"),
    Size("ep", "expert_model_parallel_size", "EP", "expert parallel"),
    Size("etp", "expert_tensor_parallel_size", "ETP", "expert tensor parallel", optional=True),
)
SIZE_FIELDS = {size.short: size.name for size in SIZES}
"""The strategy's names of the sizes by their short names."""
LAYOUT_FIELDS = {**SIZE_FIELDS, "sp": "sequence_parallel"}
"""The strategy's names of all fields of a `Layout`."""


def _of_strategy(name: str) -> Callable[[Any], Any]:
    def read(strategy: Any) -> Any:
        if not hasattr(strategy, name):
            return NOT_HERE
        value = getattr(strategy, name)
        if name == "virtual_pipeline_model_parallel_size" and strategy.pipeline_model_parallel_size == 1:
            return None
        if name == "expert_tensor_parallel_size" and value is None:
            return strategy.tensor_model_parallel_size
        return NOT_HERE if isinstance(value, str) else value  # text such as "auto" is resolved later

    return read


register_elsewhere(
    "megatron.core.transformer.transformer_config:TransformerConfig",
    "trainer.strategy",
    **{name: _of_strategy(name) for name in LAYOUT_FIELDS.values()},
)
Groups = tuple[tuple[int, ...], ...]

_DENSE_GROUPS = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "dp_cp": "dp-cp"}
EXPERT_GROUPS = {"etp": "tp", "ep": "ep", "expert_dp": "dp"}
_WORDS = {size.short: size.group for size in SIZES if size.group is not None} | {
    "dp": "data parallel",
    "dp_cp": "data and context parallel",
    "expert_dp": "expert data parallel",
}
GROUP_NAMES = {kind: _WORDS[kind] for kind in (*_DENSE_GROUPS, *EXPERT_GROUPS)}
"""The kinds of groups by their short names. Over ``dp_cp`` the gradients of dense weights are reduced and the distributed
optimizer's states are sharded. ``expert_dp`` does the same for the weights of experts."""
_OPTIONAL = frozenset(size.short for size in SIZES if size.optional)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parallel sizes under their usual short names."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a shard of every weight matrix."""
    pp: int = 1
    """Pipeline stages."""
    vp: Optional[int] = None
    """Virtual stages (model chunks) per pipeline rank. None: the schedule isn't interleaved."""
    cp: int = 1
    """Context-parallel ranks: each holds a shard of every sequence."""
    ep: int = 1
    """Expert-parallel ranks: each holds some of the experts."""
    etp: Optional[int] = None
    """Tensor-parallel ranks inside an expert. None: the same as ``tp``, as in Megatron-Core."""
    sp: bool = False
    """Sequence parallelism: between the matrix products the sequence is sharded over the tensor-parallel ranks."""

    def __post_init__(self) -> None:
        problems = self.size_problems(**{name: getattr(self, name) for name in SIZE_FIELDS})
        if problems:
            raise ConfigError("\n".join(problems))

    @staticmethod
    def size_problems(**sizes: Any) -> list[str]:
        """One sentence for each of the sizes, by short name, that is not an integer of at least 1. ``sp`` is not a
        size."""
        set_sizes: dict[str, Any] = {
            SIZE_FIELDS[name]: value
            for name, value in sizes.items()
            if name in SIZE_FIELDS and not (value is None and name in _OPTIONAL)
        }
        return count_problems("strategy", **set_sizes)

    @classmethod
    def of(cls, strategy: Any) -> "Layout":
        """The layout of a strategy, as a config or a live object, or of any object with fields of these names. A field
        that is missing or None has its default. FSDP2Strategy has a name of its own for ``tp``.

        Raises:
            ConfigError: a size is not an integer of at least 1.
        """
        values = {short: getattr(strategy, name, None) for short, name in LAYOUT_FIELDS.items()}
        if is_count(size := getattr(strategy, "tensor_parallel_size", None)):  # not "auto"
            values["tp"] = size
        return cls(**{short: value for short, value in values.items() if value is not None})

    def fields(self) -> dict[str, Any]:
        """The sizes and ``sequence_parallel``, under the names of the strategy and of Megatron-Core's
        configurations."""
        return {name: getattr(self, short) for short, name in LAYOUT_FIELDS.items()}

    def overrides(self, before: Mapping[str, Any]) -> list[str]:
        """The overrides, in the command line's form, that change the layout ``before`` into this one."""
        changed = [short for short in LAYOUT_FIELDS if getattr(self, short) != before[short]]
        if {self.vp, before["vp"]} == {None, 1}:
            changed.remove("vp")
        return [f"strategy.{LAYOUT_FIELDS[short]}={getattr(self, short)}" for short in changed]

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the dense model: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that hold one replica of the experts: ``etp * ep * pp``."""
        return self.expert_tensor_size * self.ep * self.pp

    @property
    def expert_tensor_size(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def interleaved(self) -> bool:
        """Whether pipeline stages are divided into chunks."""
        return self.pp > 1 and (self.vp or 1) > 1

    @property
    def smallest_world(self) -> int:
        """The smallest world size for the layout. Every valid world size is a multiple of it."""
        return math.lcm(self.model_parallel_size, self.expert_parallel_size)

    def data_parallel_size(self, world_size: int) -> int:
        """The replicas of the model in a world.

        Raises:
            ConfigError: the world size isn't a multiple of ``tp * pp * cp``, or of ``etp * ep * pp`` with sharded
                experts.
        """
        problem = self.world_problem(world_size)
        if problem:
            raise ConfigError(problem)
        return world_size // self.model_parallel_size

    def world_problem(self, world_size: int) -> Optional[str]:
        """Why this layout doesn't fit ``world_size`` ranks. None: it fits."""
        size = self.model_parallel_size
        if world_size % size:
            up = -(-world_size // size) * size
            return (
                f"tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = {self.tp} * "
                f"{self.pp} * {self.cp} = {size} does not divide the world of "
                f"{counted(world_size, 'rank')}. Run on {up} ranks (or another multiple of {size}), or use a "
                "smaller layout."
            )
        expert = self.expert_parallel_size
        if world_size % expert:
            origin = (
                ""
                if self.etp is not None
                else (" (expert_tensor_parallel_size is unset and therefore equals the tensor-parallel size)")
            )
            return (
                "expert_tensor_parallel_size * expert_model_parallel_size * pipeline_model_parallel_size = "
                f"{self.expert_tensor_size} * {self.ep} * {self.pp} = {expert}{origin} does not divide the world "
                f"of {counted(world_size, 'rank')}. Run on a multiple of {expert} ranks, or reduce the expert sizes."
            )
        return None

    def mapping_problem(self, world_size: int) -> Optional[str]:
        """Why ``use_tp_pp_dp_mapping`` can't be used in a world that this layout fits: dense layers and experts would have
        different neighbors in the pipeline. None: it can."""
        dense, expert = world_size // self.model_parallel_size, world_size // self.expert_parallel_size
        if self.pp == 1 or dense == expert:
            return None
        return (
            "strategy.use_tp_pp_dp_mapping=True requires equal numbers of replicas of the dense layers and of the "
            f"experts. Dense layers have {world_size} / (tensor {self.tp} * pipeline {self.pp} * context {self.cp}) "
            f"= {dense}, and experts have {world_size} / (expert tensor {self.expert_tensor_size} * expert {self.ep} * "
            f"pipeline {self.pp}) = {expert}. Set use_tp_pp_dp_mapping=False, or choose sizes for which tensor * "
            "context = expert tensor * expert."
        )

    def interleaving_problem(self, num_microbatches: int, group_size: Optional[int]) -> Optional[str]:
        """Why the interleaved schedule can't run this many micro-batches in groups of ``group_size``
        (``microbatch_group_size_per_vp_stage``; None: ``pp``). None: it can, or the layout isn't interleaved.

        Source: Megatron-Core ``forward_backward_pipelining_with_interleaving``.
        """
        pp, group, count = self.pp, group_size or self.pp, num_microbatches
        if self.interleaved and not pp <= group <= count:
            fixes = [f"set it to at least {pp}"] if group < pp else []
            fixes += [f"use at least {max(group, pp)} micro-batches"] if count < max(group, pp) else []
            return (
                f"strategy.microbatch_group_size_per_vp_stage={group} must lie between the pipeline size {pp} and the number "
                f"of micro-batches {count}: {' and '.join(fixes)}, or use no virtual stages."
            )
        if self.interleaved and 0 < (left := count % group) < pp:
            return (
                f"{count} micro-batches leave {left} after groups of {group}, fewer than the {pp} pipeline stages. "
                f"Use {count - left} or {count - left + pp} micro-batches."
            )
        return None

    def describe(self, world_size: Optional[int] = None) -> str:
        """One line, e.g. ``TP 2 (SP) · PP 4 x VP 2 · CP 2 · DP 8``, without sizes of 1."""
        suffix = {"tp": " (SP)" if self.sp else "", "pp": f" x VP {self.vp}" if (self.vp or 1) > 1 else ""}
        parts = [
            f"{size.label} {getattr(self, size.short)}{suffix.get(size.short, '')}"
            for size in SIZES
            if self._cuts(size)
        ]
        if world_size is not None and world_size % self.model_parallel_size == 0:
            parts.append(f"DP {world_size // self.model_parallel_size}")
        return " · ".join(parts) or "one rank"

    def _cuts(self, size: Size) -> bool:
        """Whether to mention a size: it has groups of several ranks, or it shards experts differently from the dense
        layers."""
        if size.short == "etp":
            return self.ep > 1 and self.etp not in (None, self.tp)
        return size.group is not None and getattr(self, size.short) > 1


@dataclass
class ParallelismConfig:
    """The strategy's sizes under the names of the model configuration's fields, into which they are written."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: Optional[int]
    context_parallel_size: int
    sequence_parallel: bool
    expert_model_parallel_size: int
    expert_tensor_parallel_size: Optional[int]
    pipeline_dtype: Optional[Any] = None
    """A torch dtype. This module doesn't import torch."""
    microbatch_group_size_per_vp_stage: Optional[int] = None
    num_layers_in_first_pipeline_stage: Optional[int] = None
    num_layers_in_last_pipeline_stage: Optional[int] = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: Optional[Union[str, list]] = None
    pipeline_model_parallel_comm_backend: Optional[str] = None
    use_te_rng_tracker: bool = False


def rank_order(*, tp_pp_dp: bool = False) -> str:
    """The order of the dimensions in rank numbers, fastest first, in Megatron-Core's notation. Without ``tp_pp_dp`` it is
    Megatron-Core's default."""
    return "tp-cp-ep-pp-dp" if tp_pp_dp else "tp-cp-ep-dp-pp"


def groups_of(layout: Layout, world_size: int, *, order: Optional[str] = None) -> dict[str, Groups]:
    """Every group that Megatron-Core makes of a world, by the kinds of `GROUP_NAMES`.

    Raises:
        ConfigError: the layout doesn't fit the world.
    """
    from megatron.core.parallel_state import RankGenerator

    dp = layout.data_parallel_size(world_size)
    order = order or rank_order()
    expert_dp = world_size // layout.expert_parallel_size
    # Megatron-Core asserts it for dense models too, because it also creates the groups of experts for them.
    if not order.endswith("pp") and (problem := layout.mapping_problem(world_size)):
        raise ConfigError(problem)
    # The two generators and their sizes are those of Megatron-Core's initialize_model_parallel.
    dense = RankGenerator(tp=layout.tp, ep=1, dp=dp, pp=layout.pp, cp=layout.cp, order=order)
    expert = RankGenerator(tp=layout.expert_tensor_size, ep=layout.ep, dp=expert_dp, pp=layout.pp, cp=1, order=order)
    groups = {kind: dense.get_ranks(token) for kind, token in _DENSE_GROUPS.items()}
    groups |= {kind: expert.get_ranks(token) for kind, token in EXPERT_GROUPS.items()}
    return {kind: tuple(map(tuple, ranks)) for kind, ranks in groups.items()}
