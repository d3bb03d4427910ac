# SPDX-License-Identifier: Apache-2.0
"""A low-rank adapter of a linear layer: its two factors, the layer with its adapter, and merging the two."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Optional

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.sharded_state import added_keys
from nemo2.mcore.parallel.transform import forget_transform
from nemo2.models.layers.attend import wide
from nemo2.models.peft.placement import Placement, placement_of

InitMethod = Literal["xavier", "uniform", "kaiming", "normal", "zero"]
INIT_METHODS: tuple[InitMethod, ...] = ("xavier", "uniform", "kaiming", "normal", "zero")


class Factor(nn.Module):
    """One factor of an adapter: a matrix without a bias.

    The factor is a module, so that the hooks of ``overlap_param_gather`` wait for its weight before a call.

    Args:
        shape: ``[outputs, inputs]`` over all ranks.
        axis: the axis that is sharded over the ranks of ``placement``. None: each rank holds the whole matrix.
        like: the weight of the layer, which determines dtype and device.
        name: the full name of the factor. It seeds the initial values, so they are the same in every layout.
        sections: the numbers of rows of the parts that are sharded separately, if the layer's weight has such parts
            (gate and up projection). None: each rank's rows are consecutive.
        whole_layer: whether the factor has all rows of the layer, so that checkpoints store them like the weight's rows.
            False: the factor has the rows of one part of the layer.
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
            unsharded = first_values(shape, init_method, name)
            if axis is not None:
                parts = unsharded.split(sections or shape[axis], dim=axis)
                unsharded = torch.cat(
                    [part.chunk(placement.size, dim=axis)[placement.rank] for part in parts], dim=axis
                )
            with torch.no_grad():
                self.weight.copy_(unsharded)

    def forward(self, x: Optional[Tensor]) -> Tensor:
        """Multiply ``x``, [..., inputs of this rank], by the matrix. Returns [..., outputs of this rank] in the dtype of
        ``x``. An ``x`` of None: returns the matrix."""
        weight = self.weight
        if self._sums:
            weight = mappings.copy_to_tensor_model_parallel_region(weight, group=self.placement.group)
        return weight if x is None else F.linear(x, weight.to(x.dtype))


class LowRank(nn.Module):
    """An adapter, ``scale B A x``, on the ranks of a linear layer.

    Args:
        placement: the layer's placement.
        like: the layer's weight.
        name: the layer's full name.
        scale: usually alpha over rank.
        dropout, dropout_position: as in `LoRA`.
        outputs, part: the number of rows and the name of the part, for an adapter of one part of a fused layer.
        sections: the numbers of rows of the layer's parts, as in `Factor`.
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
        """The adapter's output on this rank, which is added to the layer's output. ``x`` is the layer's input on this
        rank."""
        return self.placement.gathered(self.before_gather(x))

    def before_gather(self, x: Tensor) -> Tensor:
        part = self.placement.travel == "sequence" or self.placement.sees_a_part
        x = self._dropped(x, "pre", differs=self.placement.split == "row" or part)
        hidden = self.placement.between(self.linear_in(x))
        output = self.linear_out(hidden)
        sharded = self.placement.split == "column" or part
        return self._dropped(output, "post", differs=sharded) * self.scale

    def product(self) -> Tensor:
        """``scale B A`` on this rank, with the shape of the layer's weight on this rank, in fp32."""
        return self.scale * (wide(self.linear_out(None)) @ wide(self.linear_in(None)))

    def _dropped(self, x: Tensor, position: str, *, differs: bool) -> Tensor:
        """Apply dropout to ``x``.

        If ranks hold different parts of it (``differs``), each uses its own random stream, as Megatron-Core does for
        parts of the sequence. Otherwise all ranks drop the same elements.
        """
        if not self.training or self.dropout == 0 or self.dropout_position != position:
            return x
        if differs and (self.placement.size > 1 or self.placement.sees_a_part):
            tracker: Any = tensor_parallel.get_cuda_rng_tracker()
            with tracker.fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)


class Adapted(nn.Module):
    """A linear layer with an adapter, whose output is added to the layer's output.

    The layer's attributes can be read on this module. The layer's parameters keep their names in checkpoints.
    """

    layer_attribute: ClassVar[str] = "to_wrap"
    """Where the layer is, whose tensors `sharded_state_dict` describes under the layer's own names."""

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = adapter

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "to_wrap":  # not set yet: don't recurse
                raise
            return getattr(self.to_wrap, name)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict[str, Any]] = None
    ) -> dict[str, Any]:
        """The layer's tensors under the layer's own names, by which the module around it may look them up, as Mamba's mixers
        do. `nemo2.mcore.parallel.sharded_state` gives them their names in ``state_dict()``."""
        state = {}
        for module, name in ((self.to_wrap, prefix), (self.adapter, f"{prefix}adapter.")):
            state |= sharded_state_dict_default(module, name, sharded_offsets, metadata)
        return state

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's output plus the adapter's, and the layer's bias if the layer leaves the bias to the caller."""
        layer: Any = self.to_wrap
        if hasattr(layer, "finished"):  # nemo2.models.layers.post_norm: the norm or the multiplier follows the sum
            output, bias = layer.project(x, *args, **kwargs)
            return layer.finished(self.joined(output, bias, x), bias)
        output, bias, seen = call(layer, x, *args, **kwargs)
        joined = self.joined(output, bias, seen)
        return joined if type(layer) is nn.Linear else (joined, bias)

    def merged_weight(self) -> Tensor:
        """The layer's weight plus the adapter's product on this rank, in fp32."""
        return wide(self.to_wrap.weight) + self.adapter.product()  # pyright: ignore

    def joined(self, output: Tensor, bias: Optional[Tensor], x: Tensor) -> Tensor:
        """The layer's output plus the adapter's output.

        Args:
            output: the layer's output, including its bias unless the bias is separate.
            x: the input of the layer's matrix product.
        """
        return output + self.adapter(x)


def call(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """Call a linear layer. Returns its output, its bias if the caller has to add it, and the input of its matrix product.

    The input of the product is normalized if the layer contains its norm, as some of Transformer Engine's layers do.
    """
    result = layer(x, *args, **kwargs)
    if not isinstance(result, tuple):  # torch.nn.Linear
        return result, None, x
    if not getattr(layer, "return_layernorm_output", False):
        return result[0], result[1], x
    if len(result) == 3:
        return result[0], result[1], result[2]
    (output, normed), bias = result
    return output, bias, normed


def sections_of(layer: Any, name: str, placement: Placement) -> Optional[list[int]]:
    """The numbers of rows, over all ranks, of the parts of a layer's weight that are sharded separately over the
    tensor-parallel ranks. None: the layer has one part or one rank."""
    if placement.split != "column" or placement.size == 1:
        return None
    if (sizes := getattr(layer.weight, "partition_sizes", None)) is not None:  # a Mamba mixer's in_proj
        return [size * placement.size for size in sizes]
    if name.rpartition(".")[2] == "linear_fc1" and layer.config.gated_linear_unit:
        return [placement.outputs // 2] * 2
    return None


def prepare(layer: Any) -> None:
    """Make a Transformer Engine layer that normalizes its input also return the normalized input."""
    if hasattr(layer, "return_layernorm_output"):
        layer.return_layernorm_output = True
        layer.return_layernorm_output_gathered = False


def mark(parameter: nn.Parameter, *, axis: Optional[int], placement: Placement) -> None:
    """Set the attributes by which Megatron-Core knows how a parameter is distributed over tensor-parallel ranks.

    The parameter then counts once in the gradient norm, and its gradients are reduced over the ranks that hold it.
    """
    settings: Any = parameter
    sharded = axis is not None and placement.size > 1
    settings.tensor_model_parallel = sharded
    settings.partition_dim, settings.partition_stride = (axis if sharded else -1), 1
    settings.sequence_parallel = placement.sees_a_part or (axis is None and placement.travel == "sequence")
    if placement.expert:
        settings.allreduce = False
        # Tensor-parallel ranks hold different experts, so each rank counts its own. If all ranks of an expert hold the
        # same factor, the first rank counts it.
        settings.tensor_model_parallel = sharded or placement.rank == 0


def first_values(shape: Sequence[int], init_method: InitMethod, name: str) -> Tensor:
    """The initial values of a factor, drawn in fp32 from the run's seed and the factor's name. They are the same on
    every rank and layout.

    - "xavier": normal, variance 2 / (inputs + outputs) (Glorot & Bengio, 2010)
    - "uniform", "kaiming": uniform within 1 / sqrt(inputs), as in ``torch.nn.Linear``
    - "normal": standard deviation 0.02
    - "zero": zeros
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
    # Pipeline stages have different seeds (nemo2.mcore.parallel.groups.seed_random_streams), but their layers already differ
    # by name.
    initialized = parallel_state.model_parallel_is_initialized()
    return torch.initial_seed() - (100 * parallel_state.get_pipeline_model_parallel_rank() if initialized else 0)


def required_placement(layer: nn.Module, name: str) -> Placement:
    """The placement of a layer that gets an adapter.

    Raises:
        ConfigError: the module isn't a linear layer.
    """
    placement = placement_of(layer)
    if placement is None:
        raise ConfigError(
            f"peft.target_modules: {name} is a {type(layer).__name__}, and only linear layers can have adapters. Remove it from "
            "the targets, or name it in peft.exclude_modules."
        )
    return placement


@torch.no_grad()
def merge(core: nn.Module) -> None:
    """Merge every adapter of a model chunk into its layer's weight on this rank, and restore the plain layer.

    Sums are computed in fp32 and rounded once.

    Raises:
        ConfigError: a method of the user's own has added other modules, which the plain model has no place for.
    """
    for parent in list(core.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Adapted):
                layer: Any = child.to_wrap
                layer.weight.copy_(child.merged_weight())
                setattr(parent, name, layer)
                if hasattr(layer, "return_layernorm_output"):
                    layer.return_layernorm_output = False
    if left := sorted(added_keys(core)):
        raise ConfigError(
            f"{left[0]} belongs to a module that model_transform has added, and only nemo2's adapters can be merged "
            "(nemo2.models.peft.adapter.Adapted, by its merged_weight). llm.generate and a resumed run take the checkpoint as it "
            "is, with its model_transform."
        )
    forget_transform(core)
