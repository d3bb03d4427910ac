# SPDX-License-Identifier: Apache-2.0
"""DoRA: trains the length of each row of a weight, and LoRA changes its direction (Liu et al., arXiv:2402.09353)."""

from collections.abc import Callable
from typing import Any, Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.models.layers.attend import wide
from nemo2.models.peft.adapter import Adapted, InitMethod, LowRank, mark
from nemo2.models.peft.lora import LoRA


class Magnitude(nn.Module):
    """The trained length of each row of a weight ``W``, ``[outputs]``, sharded over ranks like the rows.

    A call returns ``m / |W + s B A|`` for each row, in fp32. The layer's output is scaled by it. As in the paper's
    section 4.3, the norm is a constant in the backward.

    Args:
        part: A function that selects the rows of a part of the layer from a tensor with all its rows on this rank.
            None: all rows.
    """

    _of: tuple[Any, LowRank]
    """The layer and its adapter. Neither is registered as a child module."""

    def __init__(
        self, layer: nn.Module, low_rank: LowRank, *, part: Optional[Callable[[Tensor], Tensor]] = None
    ) -> None:
        super().__init__()
        self._part = part
        weight: Any = layer.weight
        placement = low_rank.placement
        rows = len(weight if part is None else part(weight))
        self.weight = nn.Parameter(torch.ones(rows, dtype=weight.dtype, device=weight.device))
        mark(self.weight, axis=0 if placement.split == "column" else None, placement=placement)
        if placement.split == "column" and part is None:
            self.weight.rows_like = weight  # pyright: ignore[reportAttributeAccessIssue]
        self.__dict__["_of"] = (layer, low_rank)
        self._sums = placement.split != "column" and placement.travel == "outside"
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Set the trained lengths to the lengths of the current rows, so that the model's output stays the same."""
        if not self.weight.is_meta:
            self.weight.copy_(self.lengths())

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """``|W + s B A|``, ``[outputs of this rank]``, in fp32."""
        layer, low_rank = self._of
        weight = layer.weight if self._part is None else self._part(layer.weight)
        squares = (wide(weight) + low_rank.product()).square().sum(dim=1)
        placement = low_rank.placement
        if placement.split == "row" and placement.size > 1:
            dist.all_reduce(squares, group=placement.group)
        return squares.sqrt()

    def forward(self) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        weight = self.weight
        if self._sums:
            weight = mappings.copy_to_tensor_model_parallel_region(weight, group=self._of[1].placement.group)
        return wide(weight) / self.lengths()


class Decomposed(Adapted):
    """A linear layer ``m (W + s B A) / |W + s B A| x``, with the bias added separately."""

    def weights_loaded(self, names: set[str]) -> None:
        """Called after weights were loaded, with the names of the loaded weights below this module.

        If the trained lengths were not loaded, the weights are those of a base model, and the lengths of its rows become
        the trained lengths.
        """
        if not any(name.endswith("magnitude.weight") for name in names):
            for module in self.adapter.modules():
                if isinstance(module, Magnitude):
                    module.begin()

    def growth(self) -> Tensor:
        """The factor of each row of the layer on this rank, in fp32."""
        return self.adapter.magnitude()  # pyright: ignore

    def merged_weight(self) -> Tensor:
        return super().merged_weight() * self.growth().unsqueeze(1)

    def joined(self, output: Tensor, bias: Optional[Tensor], x: Tensor) -> Tensor:
        layer: Any = self.to_wrap
        adapter: Any = self.adapter
        inside = getattr(layer, "bias", None) if bias is None else None
        if inside is not None and not inside.numel():  # what Transformer Engine's layers have without a bias
            inside = None
        product = output if inside is None else output - inside
        growth = adapter.placement.gathered(self.growth().to(product.dtype))
        scaled = growth * (product + adapter(x))
        return scaled if inside is None else scaled + inside


@configurable
class DoRA(LoRA):
    """Fine-tune with DoRA: ``y = m (W + alpha / dim B A) / |W + alpha / dim B A| x``, with W frozen and the length m of
    each row trained.

    For the lengths, each forward computes the product of B and A, which is as large as W. Dropout applies only to the
    output of the adapters. The arguments are those of `LoRA`.
    """

    reads_weights = True

    def __init__(
        self,
        target_modules: Optional[list[str]] = None,
        exclude_modules: Optional[list[str]] = None,
        dim: int = 32,
        alpha: float = 64,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "pre",
        lora_A_init_method: InitMethod = "xavier",
        lora_B_init_method: InitMethod = "zero",
        lora_dtype: Optional[torch.dtype] = None,
        modules_to_save: Optional[list[str]] = None,
    ) -> None:
        super().__init__(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})

    def adapted(self, layer: nn.Module, adapter: nn.Module) -> nn.Module:
        assert isinstance(adapter, LowRank)
        adapter.magnitude = Magnitude(layer, adapter)
        return Decomposed(layer, adapter)
