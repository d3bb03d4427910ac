# SPDX-License-Identifier: Apache-2.0
"""The placement of ranks: the groups of every kind over a whole world, and the layers of every pipeline stage.

Nothing is initialized and no process runs. The groups are those of Megatron-Core's `RankGenerator`, the layers those of
its `get_num_layers_to_build`, `get_transformer_layer_offset` and `PipelineParallelLayerLayout`, so that the picture
equals a run.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.config.walk import class_of
from nemo2.mcore.parallel.layout import EXPERT_GROUPS, GROUP_NAMES, Groups, Layout, groups_of, rank_order


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The contents of a virtual stage, or of a whole pipeline stage if the schedule isn't interleaved."""

    layers: range
    """The decoder layers, numbered from 0 over the whole model."""
    embedding: bool = False
    loss: bool = False
    """Whether the chunk has the output layer and the loss."""
    mtp_layers: int = 0
    """The number of multi-token prediction layers."""

    def describe(self) -> str:
        """The contents in words, for example ``embedding, layers 0-3``."""
        parts = ["embedding"] if self.embedding else []
        if len(self.layers):
            first, last = self.layers[0], self.layers[-1]
            parts.append(f"layer {first}" if first == last else f"layers {first}-{last}")
        if self.mtp_layers:
            parts.append("MTP" if self.mtp_layers == 1 else f"{self.mtp_layers} MTP")
        return ", ".join([*parts, "output"] if self.loss else parts) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on the ranks of a world."""

    name: str
    layout: Layout
    world_size: int
    gpus_per_node: int
    order: str
    """The order of the dimensions in rank numbers, fastest first, in Megatron-Core's notation: ``tp-cp-ep-dp-pp``."""
    groups: Mapping[str, Groups]
    """All groups of the world by kind. The kinds are the keys of `GROUP_NAMES`."""
    stages: tuple[tuple[Chunk, ...], ...]
    """The chunks by pipeline rank, then by virtual stage."""
    num_experts: Optional[int] = None
    """The number of experts. None: a dense model."""

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    @property
    def replicas(self) -> int:
        return len(self.groups["dp"][0])

    @property
    def num_layers(self) -> int:
        return sum(len(chunk.layers) for stage in self.stages for chunk in stage)

    @property
    def kinds(self) -> dict[str, str]:
        """The names of the kinds of groups. Only models with experts use the groups of experts."""
        return {kind: name for kind, name in GROUP_NAMES.items() if self.num_experts or kind not in EXPERT_GROUPS}

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's group of a kind, including the rank itself."""
        return self.groups[kind][self._places[kind][rank][0]]

    def index_in(self, kind: str, rank: int) -> int:
        """This rank's index in its group of a kind: its tensor-parallel rank for ``tp``, its stage for ``pp``."""
        return self._places[kind][rank][1]

    def nodes_spanned(self, kind: str) -> int:
        """The largest number of nodes that a group of a kind spans."""
        return max(len({self.node_of(rank) for rank in group}) for group in self.groups[kind])

    def replica(self, index: int = 0) -> list[list[int]]:
        """The ranks of one replica of the model by pipeline stage, in ascending order."""
        rows: list[list[int]] = [[] for _ in self.stages]
        for rank in range(self.world_size):
            if self.index_in("dp", rank) == index:
                rows[self.index_in("pp", rank)].append(rank)
        return rows

    def experts_of(self, rank: int) -> range:
        """The experts of each MoE layer that this rank holds. With expert tensor parallelism it holds a shard of each.

        Source: Megatron-Core ``BaseMoELayer``: contiguous ranges of experts in the order of the expert-parallel ranks.
        """
        if not self.num_experts:
            return range(0)
        share = self.num_experts // self.layout.ep
        first = self.index_in("ep", rank) * share
        return range(first, first + share)

    @cached_property
    def _places(self) -> dict[str, dict[int, tuple[int, int]]]:
        return {
            kind: {rank: (number, index) for number, group in enumerate(groups) for index, rank in enumerate(group)}
            for kind, groups in self.groups.items()
        }


def place_recipe(recipe: Any, *, name: str = "", world_size: Optional[int] = None) -> Placement:
    """Place a recipe on its GPUs, or on a world of another size.

    Args:
        recipe: A configured call of ``llm.pretrain`` or a similar function with a ``MegatronStrategy``. Its trainer has
            the numbers of nodes and devices (`nemo2.mcore.settle.on`).
        name: The name of the recipe. "": no name.
        world_size: The number of ranks. None: the trainer's nodes times devices.

    Raises:
        ConfigError: the layout doesn't fit the world, or Megatron-Core can't split the layers in this way.
    """
    trainer = recipe.trainer
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "tensor_model_parallel_size"):
        raise ConfigError(
            f"trainer.strategy={class_of(strategy).__name__} has no parallel sizes, and only MegatronStrategy's layout can be "
            "shown."
        )
    layout = Layout.of(strategy)
    ranks = world_size or trainer.num_nodes * trainer.devices
    config = recipe.model.config
    return Placement(
        name=name,
        layout=layout,
        world_size=ranks,
        gpus_per_node=min(trainer.devices, ranks),
        order=(order := rank_order(tp_pp_dp=bool(strategy.use_tp_pp_dp_mapping))),
        groups=groups_of(layout, ranks, order=order),
        stages=stages_of(
            layout,
            num_layers=config.num_layers,
            mtp_num_layers=getattr(config, "mtp_num_layers", None),
            num_layers_in_first_pipeline_stage=strategy.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=strategy.num_layers_in_last_pipeline_stage,
            account_for_embedding_in_pipeline_split=bool(strategy.account_for_embedding_in_pipeline_split),
            account_for_loss_in_pipeline_split=bool(strategy.account_for_loss_in_pipeline_split),
            pipeline_model_parallel_layout=strategy.pipeline_model_parallel_layout,
        ),
        num_experts=getattr(config, "num_moe_experts", None),
    )


def stages_of(
    layout: Layout,
    *,
    num_layers: int,
    mtp_num_layers: Optional[int] = None,
    pipeline_model_parallel_layout: Any = None,
    **split: Any,
) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every pipeline rank.

    Args:
        layout: The layout, which defines the numbers of stages and virtual stages.
        num_layers: The decoder layers of the whole model.
        mtp_num_layers: The multi-token prediction layers. None: no such layers.
        pipeline_model_parallel_layout: A layout in Megatron-Core's notation, which may also set the number of virtual
            stages.
        split: Megatron-Core's fields for uneven stages, such as ``num_layers_in_first_pipeline_stage``.

    Raises:
        ConfigError: Megatron-Core rejects the split. The message has Megatron-Core's reason.
    """
    import torch
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = TransformerConfig(
                num_layers=num_layers,
                mtp_num_layers=mtp_num_layers,
                # These fields have no defaults, and the result doesn't depend on them.
                hidden_size=64,
                num_attention_heads=1,
                pipeline_dtype=torch.bfloat16,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vp if layout.pp > 1 else None,
                pipeline_model_parallel_layout=pipeline_model_parallel_layout,
                **split,
            )
            written_out: Any = config.pipeline_model_parallel_layout  # Megatron-Core has parsed the text
            if written_out is not None:
                return _stages_from_table(written_out.layout, LayerType)
            vp = config.virtual_pipeline_model_parallel_size
            last = layout.pp - 1, (vp or 1) - 1

            def chunk(rank: int, index: int) -> Chunk:
                stage: Any = {"vp_stage": index if vp else None, "pp_rank": rank}
                first = get_transformer_layer_offset(config, **stage)
                return Chunk(
                    layers=range(first, first + get_num_layers_to_build(config, **stage)),
                    embedding=(rank, index) == (0, 0),
                    loss=(rank, index) == last,
                    mtp_layers=(mtp_num_layers or 0) if (rank, index) == last else 0,
                )

            return tuple(tuple(chunk(rank, index) for index in range(vp or 1)) for rank in range(layout.pp))
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{num_layers} layers can't be split over pipeline_model_parallel_size={layout.pp}, "
            f"virtual_pipeline_model_parallel_size={layout.vp}: {' '.join(str(error).split())}."
        ) from error


def _stages_from_table(table: Any, types: Any) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of Megatron-Core's parsed layout, which lists the kinds of layers by pipeline rank and virtual stage."""
    counted = 0
    chunks: dict[tuple[int, int], Chunk] = {}
    # Layers are numbered in the order in which a sample passes them: through all ranks, then their next virtual stage.
    for index in range(len(table[0])):
        for pp_rank, row in enumerate(table):
            held = row[index]
            count = held.count(types.decoder)
            chunks[pp_rank, index] = Chunk(
                layers=range(counted, counted + count),
                embedding=types.embedding in held,
                loss=types.loss in held,
                mtp_layers=held.count(types.mtp),
            )
            counted += count
    return tuple(tuple(chunks[pp_rank, index] for index in range(len(row))) for pp_rank, row in enumerate(table))
