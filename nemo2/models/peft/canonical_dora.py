# SPDX-License-Identifier: Apache-2.0
"""DoRA with separate factors and lengths for queries, keys, values, gate and up projection."""

import functools

from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.models.peft.adapter import LowRank
from nemo2.models.peft.canonical_lora import Apart, CanonicalLoRA
from nemo2.models.peft.dora import Decomposed, DirectionAndMagnitude, DoRA


class ApartWithLengths(Apart):
    """Adapters and trained lengths for the parts of a fused layer. The rows of parts that aren't targets stay
    unchanged."""

    def __init__(self, layer: nn.Module, apart: Apart) -> None:
        def with_lengths(part: str, adapter: nn.Module) -> DirectionAndMagnitude:
            assert isinstance(adapter, LowRank)
            return DirectionAndMagnitude(layer, adapter, part=functools.partial(apart.rows, part))

        adapters = {part: with_lengths(part, adapter) for part, adapter in apart.named_children()}
        super().__init__(adapters, apart.widths, apart.groups, apart.placement)

    def growth(self) -> Tensor:
        """The factor of each row of the layer on this rank, in fp32."""
        grown = {part: lengths.growth() for part, lengths in self.named_children()}  # pyright: ignore
        return self._fused(grown, without=1.0)


@configurable
class CanonicalDoRA(CanonicalLoRA, DoRA):
    """Fine-tune with `DoRA` that has separate factors and lengths for each part of a fused layer.

    `peft` trains the same on Hugging Face's models with ``use_dora``. The arguments that are not listed here are those
    of `DoRA`.

    Args:
        target_modules: As in `CanonicalLoRA`.
    """

    def adapted(self, layer: nn.Module, adapter: nn.Module) -> nn.Module:
        if isinstance(adapter, Apart):
            return Decomposed(layer, ApartWithLengths(layer, adapter))
        return super().adapted(layer, adapter)
