# SPDX-License-Identifier: Apache-2.0
"""The parts of a dense model that pruning keeps: sizes, the indices of kept parts, and the kept part of each
parameter."""

from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.config.capture import captured_arguments, configurable
from nemo2.errors import ConfigError
from nemo2.llm.importances import Importances

FAMILIES = (
    "baichuan",
    "chatglm",
    "gemma",
    "gpt3",
    "llama",
    "mistral",
    "nemotron",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder",
)
"""Modules of `nemo2.models` whose dense layers are all alike."""
LAYERS = "decoder.layers."
"""The prefix of a layer's number in the names of its parameters."""


@configurable
@dataclass(frozen=True)
class PruningConfig:
    """Set the sizes of the pruned model, under NeMo 2.0's names. None keeps a size."""

    target_ffn_hidden_size: Optional[int] = None
    """The MLP's hidden size."""
    target_hidden_size: Optional[int] = None
    """The hidden size."""
    target_num_attention_heads: Optional[int] = None
    """Attention heads."""
    target_num_query_groups: Optional[int] = None
    """Groups of query heads that share a key and value head."""
    target_mamba_num_heads: Optional[int] = None
    """Must be None: nemo2 doesn't prune Mamba layers."""
    target_mamba_head_dim: Optional[int] = None
    """Must be None: nemo2 doesn't prune Mamba layers."""
    target_num_layers: Optional[int] = None
    """Layers to keep, by importance. Excludes ``drop_layers``."""
    drop_layers: Optional[list[int]] = None
    """Layers to drop, counted from 1, independently of their importance."""


@dataclass(frozen=True)
class Sizes:
    """The sizes before and after pruning."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    """The channels of a head."""
    gated: bool
    to: PruningConfig

    @property
    def in_width(self) -> bool:
        """Whether layers become narrower, rather than fewer."""
        to = self.to
        widths = (
            to.target_ffn_hidden_size,
            to.target_hidden_size,
            to.target_num_attention_heads,
            to.target_num_query_groups,
        )
        return any(width is not None for width in widths)

    @classmethod
    def of(cls, model: Any, to: PruningConfig) -> "Sizes":
        """
        Raises:
            ConfigError: as `prune`.
        """
        config = model.config
        family = type(config).__module__.rpartition(".")[2]
        if family not in FAMILIES or config.num_moe_experts or getattr(config, "multi_latent_attention", False):
            raise ConfigError(
                f"{type(config).__name__} cannot be pruned, because its layers differ, or because it has experts or "
                f"latent attention. nemo2 prunes dense models of {', '.join(FAMILIES)}."
            )
        groups = config.num_query_groups or config.num_attention_heads
        sizes = cls(
            layers=config.num_layers,
            hidden=config.hidden_size,
            ffn=config.ffn_hidden_size,
            heads=config.num_attention_heads,
            groups=groups,
            channels=config.kv_channels,
            gated=config.gated_linear_unit,
            to=to,
        )
        sizes._refuse()
        return sizes

    def _refuse(self) -> None:
        to = self.to
        if not any(value is not None for value in asdict(to).values()):
            raise ConfigError("pruning_config sets no size, so there is nothing to prune. Set a target size.")
        for name, there in (
            ("target_hidden_size", self.hidden),
            ("target_ffn_hidden_size", self.ffn),
            ("target_num_attention_heads", self.heads),
            ("target_num_query_groups", self.groups),
            ("target_num_layers", self.layers),
        ):
            value = getattr(to, name)
            if value is not None and not 1 <= value <= there:
                raise ConfigError(f"pruning_config.{name}={value}: must be from 1 to {there}, the size of the model.")
        for name in ("target_mamba_num_heads", "target_mamba_head_dim"):
            if getattr(to, name) is not None:
                raise ConfigError(f"pruning_config.{name}={getattr(to, name)}: the model has no Mamba layers.")
        if to.drop_layers is not None and to.target_num_layers is not None:
            raise ConfigError("pruning_config.drop_layers and target_num_layers set the same thing. Keep one of them.")
        if any(not 1 <= layer <= self.layers for layer in to.drop_layers or ()):
            raise ConfigError(
                f"pruning_config.drop_layers={to.drop_layers}: layer numbers must be from 1 to {self.layers}."
            )
        heads, groups = self.new_heads
        if heads % groups or heads // groups > self.heads // self.groups:
            raise ConfigError(
                f"pruning_config keeps {heads} heads in {groups} query groups, but each group must have the same number of "
                f"heads, and at most the {self.heads // self.groups} heads that it has now. Set target_num_query_groups too."
            )

    @property
    def new_layers(self) -> int:
        """The number of layers."""
        return self.to.target_num_layers or self.layers - len(set(self.to.drop_layers or ()))

    @property
    def new_heads(self) -> tuple[int, int]:
        """The number of heads, and of their query groups."""
        heads = self.to.target_num_attention_heads or self.heads
        most = self.heads // self.groups
        groups = self.to.target_num_query_groups or (self.groups if heads >= self.groups else heads)
        return heads, max(groups, -(-heads // most))

    def stages(self, pipeline: int) -> dict[str, int]:
        """Strategy settings that distribute the kept layers over this many stages."""
        each, over = divmod(self.new_layers, pipeline)
        return {"num_layers_in_last_pipeline_stage": each + over} if over else {}

    def refuse_layout(self, *, tp_size: int, pp_size: int) -> None:
        """
        Raises:
            ConfigError: the pruned model can't be made in this layout.
        """
        if tp_size > 1 and self.in_width:
            raise ConfigError(
                f"tp_size={tp_size} splits each layer, but pruning_config makes layers narrower, which requires whole "
                f"layers. Set pp_size={tp_size * pp_size} and tp_size=1. Tensor-parallel shards support only dropping "
                "layers."
            )
        if pp_size > self.new_layers:
            raise ConfigError(
                f"pp_size={pp_size} is more than the {self.new_layers} layers that remain. Set pp_size to "
                f"{self.new_layers} or less."
            )

    def config(self, config: Any) -> Any:
        """The configuration of the pruned model."""
        heads, groups = self.new_heads
        changes = {
            "num_layers": self.new_layers,
            "hidden_size": self.to.target_hidden_size or self.hidden,
            "ffn_hidden_size": self.to.target_ffn_hidden_size or self.ffn,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": self.channels,
            "seq_length": config.seq_length,
        }
        return type(config)(**((captured_arguments(config) or {}) | changes))

    def kept(self, importances: Importances) -> "Kept":
        """The most important parts, in their original order."""
        layers = set(range(self.layers)) - {layer - 1 for layer in self.to.drop_layers or ()}
        if self.to.target_num_layers is not None:
            layers = set(_most(importances.layers, self.to.target_num_layers).tolist())
        return Kept(
            sizes=self,
            layers=sorted(layers),
            channels=_most(importances.channels, self.to.target_hidden_size or self.hidden),
            neurons=[_most(one, self.to.target_ffn_hidden_size or self.ffn) for one in importances.neurons],
            heads=[self._heads(one) for one in importances.heads],
        )

    def _heads(self, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The kept query groups, and the kept heads in each: ``[groups]`` and ``[groups, heads of each]``."""
        heads, groups = self.new_heads
        by_group = importance.view(self.groups, -1)
        chosen = _most(by_group.sum(-1), groups)
        return chosen, torch.stack([_most(by_group[group], heads // groups) for group in chosen])


@dataclass(frozen=True)
class Kept:
    """The indices of the kept parts."""

    sizes: Sizes
    layers: list[int]
    channels: Tensor
    neurons: list[Tensor]
    heads: list[tuple[Tensor, Tensor]]

    def renamed(self, name: str) -> Optional[str]:
        """A parameter's name in the pruned model. None: its layer is dropped."""
        before, layers, rest = name.partition(LAYERS)
        if not layers:
            return name
        number, _, rest = rest.partition(".")
        if int(number) not in self.layers:
            return None
        return f"{before}{layers}{self.layers.index(int(number))}.{rest}"

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The kept part of a parameter, by its name in the whole model."""
        if not self.sizes.in_width:
            return tensor  # may be a tensor-parallel rank's shard
        layer = int(name.partition(LAYERS)[2].partition(".")[0] or 0)
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if kind == "linear_qkv":
            rows = self._of_groups(tensor, layer)
            return rows.index_select(-1, self.channels) if name.endswith("weight") else rows
        if kind == "linear_proj":
            return (
                self._by_channels(tensor, self._columns_of_heads(layer))
                if name.endswith("weight")
                else self._of(tensor)
            )
        if kind == "linear_fc1":
            halves = tensor.chunk(2) if self.sizes.gated else (tensor,)
            rows = torch.cat([half.index_select(0, self.neurons[layer]) for half in halves])
            return rows.index_select(-1, self.channels) if name.endswith("weight") else rows
        if kind == "linear_fc2":
            return self._by_channels(tensor, self.neurons[layer]) if name.endswith("weight") else self._of(tensor)
        if kind in ("q_layernorm", "k_layernorm") or (kind == "output_layer" and name.endswith("bias")):
            return tensor
        return self._of(tensor)  # norms, embeddings, the output layer: channels are their last axis

    def _of(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(-1, self.channels)

    def _by_channels(self, weight: Tensor, columns: Tensor) -> Tensor:
        return weight.index_select(0, self.channels).index_select(1, columns)

    def _of_groups(self, tensor: Tensor, layer: int) -> Tensor:
        """Rows of queries, keys and values, which are ordered by group: its queries, its key, its value."""
        groups, heads = self.heads[layer]
        each = self.sizes.heads // self.sizes.groups
        blocks = tensor.view(self.sizes.groups, each + 2, self.sizes.channels, *tensor.shape[1:])
        rows = [torch.cat([blocks[group][mine], blocks[group][-2:]]) for group, mine in zip(groups, heads, strict=True)]
        return torch.stack(rows).flatten(0, 2)

    def _columns_of_heads(self, layer: int) -> Tensor:
        groups, heads = self.heads[layer]
        each, width = self.sizes.heads // self.sizes.groups, self.sizes.channels
        numbers = (groups[:, None] * each + heads).flatten()
        return (numbers[:, None] * width + torch.arange(width, device=numbers.device)).flatten()


def _most(importance: Tensor, count: int) -> Tensor:
    """The indices of the most important parts, in their original order."""
    return importance.topk(count).indices.sort().values
