# SPDX-License-Identifier: Apache-2.0
"""LoRA with separate factors for queries, keys, values, gate and up projection, as in Hugging Face's models."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from nemo2.base.errors import ConfigError
from nemo2.models.peft.adapter import LowRank, prepare, required_placement
from nemo2.models.peft.lora import LoRA, is_meant
from nemo2.models.peft.placement import Placement
from nemo2.models.peft.targets import ModuleMatcher

PARTS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
"""The projections that Megatron-Core fuses into a layer, in the order of their rows."""
CANONICAL_TARGETS = [
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_proj",
    "linear_fc1_up",
    "linear_fc1_gate",
    "linear_fc2",
]


class PartAdapters(nn.Module):
    """The adapters of a fused layer's parts. Parts that aren't targets have no adapter.

    Args:
        adapters: The adapter of each part.
        widths: The rows of each part in one group of the layer.
        groups: The number of consecutive groups in this rank's rows.
    """

    def __init__(
        self, adapters: Mapping[str, LowRank], widths: dict[str, int], groups: int, placement: Placement
    ) -> None:
        super().__init__()
        self.placement, self.widths, self.groups = placement, widths, groups
        for part, adapter in adapters.items():
            self.add_module(part, adapter)

    def forward(self, x: Tensor) -> Tensor:
        """The adapters' outputs in the order of the fused layer's rows: part by part within each of this rank's groups of
        heads."""
        by_part = {name: adapter.before_gather(x) for name, adapter in self.named_children()}  # pyright: ignore
        return self.placement.gathered(self.fused(by_part))

    def product(self) -> Tensor:
        """The adapters' products on this rank, in the rows of the layer's weight, in fp32."""
        by_part = {name: adapter.product().T for name, adapter in self.named_children()}  # pyright: ignore
        return self.fused(by_part).T

    def rows(self, part: str, weight: Tensor) -> Tensor:
        """The rows of a part, from a tensor with all of the layer's rows on this rank."""
        grouped = weight.unflatten(0, (self.groups, sum(self.widths.values())))
        index = list(self.widths).index(part)
        return grouped.split(list(self.widths.values()), dim=1)[index].flatten(0, 1)

    def fused(self, by_part: dict[str, Tensor], *, without: float = 0.0) -> Tensor:
        """The channels of the parts, ``[..., rows]`` each, in the order of the fused layer. ``without`` is the value for
        parts without an adapter."""
        like = next(iter(by_part.values()))
        channels_of_parts = []
        for part, width in self.widths.items():
            channels = by_part.get(part)
            if channels is None:
                channels = like.new_full((*like.shape[:-1], width * self.groups), without)
            channels_of_parts.append(channels.unflatten(-1, (self.groups, width)))
        return torch.cat(channels_of_parts, dim=-1).flatten(-2)


class CanonicalLoRA(LoRA):
    """Fine-tune with LoRA that has separate factors for each part of a fused layer, as `peft` trains them on Hugging
    Face's models.

    The parts are ``linear_q``, ``linear_k`` and ``linear_v`` of ``linear_qkv``, and ``linear_fc1_gate`` and
    ``linear_fc1_up`` of ``linear_fc1``. If attention's output has a gate (Qwen3-Next), ``linear_q`` makes the gates too, as
    the release's ``q_proj`` does. The arguments that are not listed here are those of `LoRA`.

    Args:
        target_modules: As in `LoRA`, with the names of the parts. None: `CANONICAL_TARGETS`.

    Raises:
        ConfigError: a target names a fused layer itself, or a value is out of range.
    """

    default_targets = CANONICAL_TARGETS

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        fused = [name for name in self.target_modules if name.rpartition(".")[2] in PARTS]
        if fused:
            parts = ", ".join(PARTS[fused[0].rpartition(".")[2]])
            raise ConfigError(
                f"peft.target_modules has {fused[0]!r}, a fused layer: {type(self).__name__} targets its parts ({parts}). Name "
                "the parts, or use LoRA or DoRA for the whole layer."
            )

    def transform(self, module: nn.Module, name: Optional[str] = None, prefix: Optional[str] = None) -> nn.Module:
        full = f"{prefix}.{name}" if prefix else name or ""
        parts = self._target_parts(name or "", prefix or "", module)
        if not parts:
            return self.unfreeze_saved(module, full)
        placement = required_placement(module, full)
        weight: Any = module.weight
        if name not in PARTS or not (widths := _widths(module, name, placement)):
            return self.with_adapter(module, full)
        prepare(module)
        groups = placement.outputs // placement.size // sum(widths.values())
        adapters = {
            part: LowRank(
                placement,
                like=weight,
                name=full,
                part=part,
                outputs=width * groups * placement.size,
                **self.factors,
            )
            for part, width in widths.items()
            if part in parts
        }
        return self.adapted(module, PartAdapters(adapters, widths, groups, placement))

    def _target_parts(self, name: str, prefix: str, module: Optional[nn.Module] = None) -> set[str]:
        """The parts of a layer that get adapters. A ``module`` of None: the layer is known to be linear."""
        if not name or ModuleMatcher([], self.exclude_modules).match(name, prefix) is None:
            return set()
        matches = {part: self.matcher.match(part, prefix) for part in PARTS.get(name, (name,))}
        return {part for part, by in matches.items() if by and (module is None or is_meant(module, by))}

    def num_first_factors(self, full: str) -> int:
        prefix, _, name = full.rpartition(".")
        return len(self._target_parts(name, prefix))

    def targets_among(self, linear_layers: Iterable[str]) -> Collection[str]:
        split = [
            (prefix, PARTS.get(name, (name,))) for prefix, _, name in (layer.rpartition(".") for layer in linear_layers)
        ]
        return [f"{prefix}.{part}".removeprefix(".") for prefix, parts in split for part in parts]


def _widths(layer: Any, name: str, placement: Placement) -> dict[str, int]:
    """The rows of each part in one group of a fused layer. Empty for a layer that isn't fused."""
    config = layer.config
    if name == "linear_fc1":
        half = placement.outputs // placement.size // 2
        return dict(zip(PARTS[name], (half, half), strict=True)) if config.gated_linear_unit else {}
    head = config.kv_channels
    if placement.outputs % head:
        return {}
    heads = config.num_attention_heads // config.num_query_groups
    gates = heads if getattr(config, "attention_output_gate", False) else 0
    queries = (heads + gates) * head
    return dict(zip(PARTS[name], (queries, head, head), strict=True))
