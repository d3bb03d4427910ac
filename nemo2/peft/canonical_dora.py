# SPDX-License-Identifier: Apache-2.0
"""DoRA with factors and lengths of their own for queries, keys, values, gate and up projection."""

import functools

from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.peft.adapter import LowRank
from nemo2.peft.canonical_lora import Apart, CanonicalLoRA
from nemo2.peft.dora import Decomposed, DirectionAndMagnitude, DoRA


class ApartWithLengths(Apart):
    """Additions and trained lengths beside the parts of a fused layer; the rows of a part that isn't meant stay the base's."""

    def __init__(self, layer: nn.Module, apart: Apart) -> None:
        def with_lengths(part: str, addition: nn.Module) -> DirectionAndMagnitude:
            assert isinstance(addition, LowRank)
            return DirectionAndMagnitude(layer, addition, part=functools.partial(apart.rows, part))

        made = {part: with_lengths(part, addition) for part, addition in apart.named_children()}
        super().__init__(made, apart.widths, apart.groups, apart.placement)

    def growth(self) -> Tensor:
        """By which each row of the layer on this rank is scaled, in fp32."""
        grown = {part: lengths.growth() for part, lengths in self.named_children()}  # pyright: ignore
        return self._fused(grown, without=1.0)


@configurable
class CanonicalDoRA(CanonicalLoRA, DoRA):
    """`DoRA` whose fused layers have factors and lengths for each of their parts. What `peft` trains with
    ``use_dora`` over Hugging Face's models.

    Args:
        target_modules: As `CanonicalLoRA`'s.

    The others are `DoRA`'s.
    """

    def adapted(self, layer: nn.Module, adapter: nn.Module) -> nn.Module:
        if isinstance(adapter, Apart):
            return Decomposed(layer, ApartWithLengths(layer, adapter))
        return super().adapted(layer, adapter)
