# SPDX-License-Identifier: Apache-2.0
"""A low-rank addition beside a linear layer: its two factors, and the layer with its addition."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal, Optional

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from nemo2.errors import ConfigError
from nemo2.peft.placement import Placement, placement_of

InitMethod = Literal["xavier", "uniform", "kaiming", "normal", "zero"]
INIT_METHODS: tuple[InitMethod, ...] = ("xavier", "uniform", "kaiming", "normal", "zero")


class Factor(nn.Module):
    """One factor of an addition, a matrix without a bias.

    It is called as a module, so that hooks of ``overlap_param_gather`` wait for its weight.

    Args:
        shape: ``[outputs, inputs]`` over all ranks.
        axis: along which the ranks of ``placement`` share it; None where each has all of it.
        like: the weight of the layer, whose dtype and device it gets.
        name: the full name of the factor, from which its first values are drawn: the same on every layout.
        sections: rows of the parts that ranks share one by one, where the layer's weight has such (a gate and what it gates).
            None: the ranks' rows follow one another.
        whole_layer: its rows are all rows of the layer, and are stored as those of the weight are; not so those of a part.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        axis: Optional[int],
        placement: Placement,
        like: Tensor,
        name: str,
        init_method: InitMethod,
        dtype: Optional[torch.dtype] = None,
        sections: Optional[list[int]] = None,
        whole_layer: bool = True,
    ) -> None:
        super().__init__()
        self.placement = placement
        local = list(shape)
        if axis is not None:
            local[axis] //= placement.size
        self.weight = nn.Parameter(torch.empty(local, dtype=dtype or like.dtype, device=like.device))
        mark(self.weight, axis=axis, placement=placement)
        if axis == 0 and whole_layer:
            self.weight.rows_like = like  # pyright: ignore[reportAttributeAccessIssue]  # read by parallel/sharded_state.py
        self._sums = axis is None and placement.travel == "outside"
        if not self.weight.is_meta:
            whole = first_values(shape, init_method, name)
            if axis is not None:
                parts = whole.split(sections or shape[axis], dim=axis)
                whole = torch.cat([part.chunk(placement.size, dim=axis)[placement.rank] for part in parts], dim=axis)
            with torch.no_grad():
                self.weight.copy_(whole)

    def forward(self, x: Optional[Tensor]) -> Tensor:
        """``x``: [..., inputs of this rank]. Returns [..., outputs of this rank] in the dtype of ``x``; for None the matrix."""
        weight = self.weight
        if self._sums:
            weight = mappings.copy_to_tensor_model_parallel_region(weight, group=self.placement.group)
        return weight if x is None else F.linear(x, weight.to(x.dtype))


class LowRank(nn.Module):
    """``B A x``, times ``scale``, on the ranks of a linear layer.

    Args:
        placement: of the layer.
        like: the layer's weight.
        name: the layer's full name.
        scale: alpha over rank, mostly.
        dropout, dropout_position: as `LoRA`'s.
        outputs, part: of a part of a fused layer, its rows and its name.
        sections: rows of the layer's parts, see `Factor`.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        like: Tensor,
        name: str,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "pre",
        a_init: InitMethod = "xavier",
        b_init: InitMethod = "zero",
        dtype: Optional[torch.dtype] = None,
        outputs: Optional[int] = None,
        part: str = "",
        sections: Optional[list[int]] = None,
    ) -> None:
        super().__init__()
        self.placement, self.scale, self.dropout, self.dropout_position = placement, scale, dropout, dropout_position
        shared: dict[str, Any] = {"placement": placement, "like": like, "dtype": dtype}
        path = f"{name}.adapter{'.' + part if part else ''}"
        row, column = placement.split == "row", placement.split == "column"
        self.linear_in = Factor(
            (rank, placement.inputs),
            axis=1 if row else None,
            name=f"{path}.linear_in",
            init_method=a_init,
            **shared,
        )
        self.linear_out = Factor(
            (outputs or placement.outputs, rank),
            axis=0 if column else None,
            name=f"{path}.linear_out",
            init_method=b_init,
            sections=sections,
            whole_layer=outputs is None,
            **shared,
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x``: the layer's input as this rank has it. Returns what is added to the layer's output on this rank."""
        return self.placement.behind(self.before_gather(x))

    def before_gather(self, x: Tensor) -> Tensor:
        part = self.placement.travel == "sequence" or self.placement.sees_a_part
        x = self._dropped(x, "pre", differs=self.placement.split == "row" or part)
        hidden = self.placement.between(self.linear_in(x))
        output = self.linear_out(hidden)
        sharded = self.placement.split == "column" or part
        return self._dropped(output, "post", differs=sharded) * self.scale

    def product(self) -> Tensor:
        """``scale B A`` as this rank has it of the layer's weight, in fp32."""
        return self.scale * (wide(self.linear_out(None)) @ wide(self.linear_in(None)))

    def _dropped(self, x: Tensor, position: str, *, differs: bool) -> Tensor:
        """``differs``: ranks hold different parts of it, which are dropped by the rank's own random stream, as Megatron-Core
        drops parts of the sequence. What all ranks hold alike is dropped alike."""
        if not self.training or self.dropout == 0 or self.dropout_position != position:
            return x
        if differs and (self.placement.size > 1 or self.placement.sees_a_part):
            tracker: Any = tensor_parallel.get_cuda_rng_tracker()
            with tracker.fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)


class Adapted(nn.Module):
    """A linear layer with an addition to its output.

    The layer's own attributes can be read here; its parameters keep their place in checkpoints.
    """

    sharded_state_dict: Any = MegatronModule.sharded_state_dict
    """Of its children; the layer's own would be found otherwise."""

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = adapter

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "to_wrap":  # not yet, or no longer, there
                raise
            return getattr(self.to_wrap, name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer: its output with the addition, and its bias where it leaves that to the caller."""
        layer: Any = self.to_wrap
        if hasattr(layer, "post_layernorm"):  # nemo2.models.layers.post_norm: the norm is behind the sum
            output, bias = layer.project(x, *args, **kwargs)
            return layer.normalised(self.joined(output, bias, x), bias)
        output, bias, seen = call(layer, x, *args, **kwargs)
        joined = self.joined(output, bias, seen)
        return joined if type(layer) is nn.Linear else (joined, bias)

    def merged_weight(self) -> Tensor:
        """The layer's weight with the addition in it, on this rank, in fp32."""
        return wide(self.to_wrap.weight) + self.adapter.product()  # pyright: ignore

    def joined(self, output: Tensor, bias: Optional[Tensor], x: Tensor) -> Tensor:
        """``output``: the layer's, with its bias unless that is given apart. ``x``: what the layer's product was of."""
        return output + self.adapter(x)


def call(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """Output of a linear layer, its bias where it is left to the caller, and what the product was of: the input, normalised
    where the layer has its norm in it, as Transformer Engine's may."""
    result = layer(x, *args, **kwargs)
    if not isinstance(result, tuple):  # torch.nn.Linear
        return result, None, x
    if not getattr(layer, "return_layernorm_output", False):
        return result[0], result[1], x
    if len(result) == 3:
        return result[0], result[1], result[2]
    (output, normed), bias = result
    return output, bias, normed


def wide(x: Tensor) -> Tensor:
    """In fp32, which is what sums and lengths are taken in; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def sections_of(layer: Any, name: str, placement: Placement) -> Optional[list[int]]:
    """Rows of the parts of a layer's weight that tensor-parallel ranks share one by one, over all ranks; None where there is
    one part, or one rank."""
    if placement.split != "column" or placement.size == 1:
        return None
    if (sizes := getattr(layer.weight, "partition_sizes", None)) is not None:  # of a Mamba mixer's in_proj
        return [size * placement.size for size in sizes]
    if name.rpartition(".")[2] == "linear_fc1" and layer.config.gated_linear_unit:
        return [placement.outputs // 2] * 2
    return None


def prepare(layer: Any) -> None:
    """Have a layer of Transformer Engine that normalises its input give the normalised input out too."""
    if hasattr(layer, "return_layernorm_output"):
        layer.return_layernorm_output = True
        layer.return_layernorm_output_gathered = False


def mark(parameter: nn.Parameter, *, axis: Optional[int], placement: Placement) -> None:
    """Tell Megatron-Core how a parameter lies on tensor-parallel ranks: it is counted once in the norm of gradients, and its
    gradients are reduced over the ranks that hold it."""
    settings: Any = parameter
    sharded = axis is not None and placement.size > 1
    settings.tensor_model_parallel = sharded
    settings.partition_dim, settings.partition_stride = (axis if sharded else -1), 1
    settings.sequence_parallel = placement.sees_a_part or (axis is None and placement.travel == "sequence")
    if placement.expert:
        settings.allreduce = False
        # Tensor-parallel ranks hold different experts, so that each counts its own; of a factor that all ranks of an expert
        # have, the first one counts.
        settings.tensor_model_parallel = sharded or placement.rank == 0


def first_values(shape: Sequence[int], init_method: InitMethod, name: str) -> Tensor:
    """The first values of a factor: drawn from the run's seed and its name, in fp32, the same on every rank and layout.

    "xavier": normal, variance 2 / (inputs + outputs) (Glorot & Bengio, 2010). "uniform", "kaiming": uniform within
    1 / sqrt(inputs), what ``torch.nn.Linear`` begins with. "normal": standard deviation 0.02. "zero".
    """
    if init_method == "zero":
        return torch.zeros(*shape)
    digest = hashlib.sha256(f"{_seed_of_the_run()}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(*shape)
    if init_method == "xavier":
        return nn.init.xavier_normal_(values, generator=generator)
    if init_method in ("uniform", "kaiming"):
        return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return nn.init.normal_(values, std=0.02, generator=generator)


def _seed_of_the_run() -> int:
    # Pipeline stages are seeded apart (nemo2.parallel.groups.seed_random_streams); names tell their layers apart already.
    initialized = parallel_state.model_parallel_is_initialized()
    return torch.initial_seed() - (100 * parallel_state.get_pipeline_model_parallel_rank() if initialized else 0)


def required_placement(layer: nn.Module, name: str) -> Placement:
    """The placement of a layer that an addition was asked for.

    Raises:
        ConfigError: it isn't a linear layer.
    """
    placement = placement_of(layer)
    if placement is None:
        raise ConfigError(
            f"peft.target_modules: {name} is a {type(layer).__name__}, and a low-rank addition goes beside a linear layer only."
        )
    return placement
