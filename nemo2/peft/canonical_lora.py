# SPDX-License-Identifier: Apache-2.0
"""LoRA with factors of their own for queries, keys, values, gate and up projection, as Hugging Face's models have them."""

from collections.abc import Collection
from typing import Any, Literal, Optional

import torch
from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.peft.adapter import InitMethod, LowRank, prepare, required_placement
from nemo2.peft.lora import LoRA, is_meant
from nemo2.peft.placement import Placement
from nemo2.peft.targets import ModuleMatcher, expanded

PARTS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
"""The projections that Megatron-Core's layers fuse, in the order of their rows."""
CANONICAL_TARGETS = [
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_proj",
    "linear_fc1_up",
    "linear_fc1_gate",
    "linear_fc2",
]


class Apart(nn.Module):
    """Additions beside the parts of a fused layer; a part that isn't meant gets none."""

    def __init__(
        self, additions: dict[str, LowRank], widths: dict[str, int], groups: int, placement: Placement
    ) -> None:
        super().__init__()
        self.placement, self.widths, self.groups = placement, widths, groups
        for part, addition in additions.items():
            self.add_module(part, addition)

    def forward(self, x: Tensor) -> Tensor:
        """The additions as the fused layer's rows lie: part by part within each of this rank's groups of heads."""
        made = {name: addition.before_gather(x) for name, addition in self.named_children()}  # pyright: ignore
        like = next(iter(made.values()))
        columns = []
        for part, width in self.widths.items():
            rows = made.get(part)
            if rows is None:
                rows = like.new_zeros(*like.shape[:-1], width * self.groups)
            columns.append(rows.unflatten(-1, (self.groups, width)))
        return self.placement.behind(torch.cat(columns, dim=-1).flatten(-2))

    def product(self) -> Tensor:
        """What is added to the layer's weight on this rank, in fp32."""
        made = {name: addition.product() for name, addition in self.named_children()}  # pyright: ignore
        like = next(iter(made.values()))
        rows = []
        for part, width in self.widths.items():
            part_rows = made.get(part)
            if part_rows is None:
                part_rows = like.new_zeros(width * self.groups, like.shape[1])
            rows.append(part_rows.unflatten(0, (self.groups, width)))
        return torch.cat(rows, dim=1).flatten(0, 1)


@configurable
class CanonicalLoRA(LoRA):
    """LoRA whose fused layers have factors for each of their parts: ``linear_q``, ``linear_k``, ``linear_v`` of ``linear_qkv``,
    ``linear_fc1_gate`` and ``linear_fc1_up`` of ``linear_fc1``. What `peft` trains over Hugging Face's models.

    Args:
        target_modules: As `LoRA`'s, by the names of the parts. None: `CANONICAL_TARGETS`.

    The others are `LoRA`'s.

    Raises:
        ConfigError: a fused layer's own name is given, or a value is out of its range.
    """

    def __init__(
        self,
        target_modules: Optional[list[str]] = None,
        exclude_modules: Optional[list[str]] = None,
        dim: int = 32,
        alpha: float = 32,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "pre",
        lora_A_init_method: InitMethod = "xavier",
        lora_B_init_method: InitMethod = "zero",
        lora_dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__(
            target_modules=target_modules,
            exclude_modules=exclude_modules,
            dim=dim,
            alpha=alpha,
            dropout=dropout,
            dropout_position=dropout_position,
            lora_A_init_method=lora_A_init_method,
            lora_B_init_method=lora_B_init_method,
            lora_dtype=lora_dtype,
        )
        if target_modules is None:
            self.target_modules = list(CANONICAL_TARGETS)
        fused = [name for name in self.target_modules if name.rpartition(".")[2] in PARTS]
        if fused:
            parts = ", ".join(PARTS[fused[0].rpartition(".")[2]])
            raise ConfigError(
                f"peft.target_modules={fused[0]!r}: CanonicalLoRA names the parts of a fused layer ({parts}); LoRA takes it "
                "as one."
            )

    def transform(self, module: nn.Module, name: Optional[str] = None, prefix: Optional[str] = None) -> nn.Module:
        full = f"{prefix}.{name}" if prefix else name or ""
        parts = set()
        for pattern, of_pattern in expanded(self.target_modules, PARTS).items():
            matcher = ModuleMatcher([pattern], self.exclude_modules)
            if name and matcher.match(name, prefix or "") and is_meant(module, pattern):
                parts |= of_pattern
        if not parts:
            return module
        placement = required_placement(module, full)
        weight: Any = module.weight
        if name not in PARTS or not (widths := _widths(module, name, placement)):
            return self.beside(module, full)
        prepare(module)
        groups = placement.outputs // placement.size // sum(widths.values())
        additions = {
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
        return self.adapted(module, Apart(additions, widths, groups, placement))

    @property
    def _patterns(self) -> Collection[str]:
        return expanded(self.target_modules, PARTS)


def _widths(layer: Any, name: str, placement: Placement) -> dict[str, int]:
    """Rows of each part in a group of a fused layer; empty where the layer isn't fused."""
    config = layer.config
    if name == "linear_fc1":
        half = placement.outputs // placement.size // 2
        return dict(zip(PARTS[name], (half, half), strict=True)) if config.gated_linear_unit else {}
    head = config.kv_channels
    if placement.outputs % head:
        return {}
    heads = config.num_attention_heads // config.num_query_groups
    if getattr(config, "attention_output_gate", False):
        raise ConfigError("peft: CanonicalLoRA has no part for the gate of attention's output: use LoRA.")
    return dict(zip(PARTS[name], (heads * head, head, head), strict=True))
