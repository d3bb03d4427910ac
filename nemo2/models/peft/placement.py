# SPDX-License-Identifier: Apache-2.0
"""Describes how tensor-parallel ranks hold a linear layer, and how they hold the two factors of its adapter.

The adapter's rank dimension is never sharded. If the layer's outputs are sharded (column-parallel), the second factor is
sharded like the weight, and each rank holds the whole first factor. Ranks exchange only a tensor as wide as the adapter's
rank. For sharded inputs (row-parallel) the two factors swap roles. Relative to the layer's own traffic, an adapter's
traffic is the adapter's rank over the layer's width. No rank needs more of the layer's input than it already has.

| layer | first factor A | second factor B | between them |
|---|---|---|---|
| column-parallel, sequence-parallel | whole, gradient summed | rows as the weight's | gather over the sequence |
| column-parallel | whole | rows | copy, whose backward sums |
| row-parallel, sequence-parallel | columns | whole, gradient summed | reduce-scatter over the sequence |
| row-parallel | columns | whole | reduce |
| the same on all ranks, sequence-parallel | whole, gradient summed | whole, gradient summed | nothing |
| an expert, or a layer whose caller communicates | as above | as above | nothing; the whole factor's gradient is summed |

LoRA: Hu et al., arXiv:2106.09685. Tensor and sequence parallelism: Korthikanti et al., arXiv:2205.05198.
"""

from dataclasses import dataclass
from typing import Any, Literal, Optional

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from nemo2.base.backend.extras import have_te

Split = Literal["column", "row", "whole"]
Travel = Literal["none", "sequence", "tensor", "outside"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A linear layer with a weight ``[outputs, inputs]`` on the ranks of one group.

    Attributes:
        split: the sharded dimension: outputs ("column"), inputs ("row"), or none ("whole").
        inputs, outputs: sizes over all ranks of the group.
        travel: who communicates activations: the layer over the sequence ("sequence") or over channels ("tensor"), its
            caller ("outside": experts, shared experts that overlap), or nobody, with one rank.
        group: the group that the layer is sharded over. None: one rank.
        gathers: whether the layer gathers its output over the ranks.
        expert: whether the layer is part of a routed expert, whose gradients are reduced over the ranks that hold that
            expert.
        sees_a_part: whether the input of a "whole" layer is this rank's part of the sequence. The gradients of both
            factors are then summed over the ranks.
    """

    split: Split
    inputs: int
    outputs: int
    travel: Travel
    group: Optional[Any] = None
    gathers: bool = False
    expert: bool = False
    sees_a_part: bool = False

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def between(self, hidden: Tensor) -> Tensor:
        """The second factor's input, from the first factor's output, ``[sequence, batch, rank]`` or ``[tokens,
        rank]``."""
        if self.travel == "sequence":
            if self.split == "column":
                return mappings.gather_from_sequence_parallel_region(hidden, group=self.group)
            return mappings.reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        if self.travel == "tensor":
            if self.split == "column":
                return mappings.copy_to_tensor_model_parallel_region(hidden, group=self.group)
            return mappings.reduce_from_tensor_model_parallel_region(hidden, group=self.group)
        return hidden

    def gathered(self, output: Tensor) -> Tensor:
        """The adapter's output, in the layout of the layer's output, from the second factor's output."""
        return (
            mappings.gather_from_tensor_model_parallel_region(output, group=self.group)
            if self.gathers and self.size > 1
            else output
        )


def placement_of(layer: nn.Module) -> Optional[Placement]:
    """The placement of a linear layer of Megatron-Core. None for any other module."""
    linear: Any = layer
    split = _split(layer)
    weight = getattr(layer, "weight", None)
    if split is None or not isinstance(weight, Tensor):
        return None
    expert = bool(getattr(linear, "is_expert", False)) or not getattr(weight, "allreduce", True)
    group = None if split == "whole" else _group(expert)
    size = 1 if group is None else dist.get_world_size(group)
    rows, columns = weight.shape
    return Placement(
        split=split,
        inputs=columns * (size if split == "row" else 1),
        outputs=rows * (size if split == "column" else 1),
        travel=_travel(linear, expert=expert, size=size),
        group=group if size > 1 else None,
        gathers=bool(getattr(linear, "gather_output", False)),
        expert=expert,
        sees_a_part=split == "whole" and bool(getattr(weight, "sequence_parallel", False)),
    )


def _split(layer: nn.Module) -> Optional[Split]:
    if isinstance(layer, ColumnParallelLinear):
        return "column"
    if isinstance(layer, RowParallelLinear):
        return "row"
    if type(layer) is nn.Linear or getattr(layer, "parallel_mode", None) == "duplicated":
        return "whole"
    if not have_te():
        return None
    from megatron.core.extensions import transformer_engine as te

    if isinstance(layer, te.TEColumnParallelLinear | te.TELayerNormColumnParallelLinear):
        return "column"
    if isinstance(layer, te.TERowParallelLinear):
        return "row"
    return "whole" if isinstance(layer, te.TELinear) else None


def _group(expert: bool) -> Optional[Any]:
    if not parallel_state.model_parallel_is_initialized():
        return None
    if expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    return parallel_state.get_tensor_model_parallel_group()


def _travel(layer: Any, *, expert: bool, size: int) -> Travel:
    if size == 1:
        return "none"
    # The parallel_mode of Transformer Engine's layers is None if the caller communicates.
    if expert or getattr(layer, "explicit_expert_comm", False) or getattr(layer, "parallel_mode", "") is None:
        return "outside"
    return "sequence" if getattr(layer, "sequence_parallel", False) else "tensor"
