# SPDX-License-Identifier: Apache-2.0
"""DoRA with separate factors and lengths for queries, keys, values, gate and up projection."""

import functools

from torch import Tensor, nn

from nemo2.models.peft.canonical_lora import CanonicalLoRA, PartAdapters
from nemo2.models.peft.dora import Decomposed, DoRA, Magnitude


class DecomposedParts(Decomposed):
    """A fused layer with trained lengths for its parts. The rows of parts that aren't targets stay unchanged."""

    def growth(self) -> Tensor:
        adapter: PartAdapters = self.adapter  # pyright: ignore[reportAssignmentType]
        by_part = {part: low_rank.magnitude() for part, low_rank in adapter.named_children()}  # pyright: ignore
        return adapter.fused(by_part, without=1.0)


class CanonicalDoRA(CanonicalLoRA, DoRA):
    """Fine-tune with `DoRA` that has separate factors and lengths for each part of a fused layer.

    `peft` trains the same on Hugging Face's models with ``use_dora``. The arguments that are not listed here are those
    of `DoRA`.

    Args:
        target_modules: As in `CanonicalLoRA`.
    """

    def adapted(self, layer: nn.Module, adapter: nn.Module) -> nn.Module:
        if not isinstance(adapter, PartAdapters):
            return super().adapted(layer, adapter)
        for part, low_rank in adapter.named_children():
            low_rank.magnitude = Magnitude(layer, low_rank, part=functools.partial(adapter.rows, part))  # pyright: ignore
        return DecomposedParts(layer, adapter)
