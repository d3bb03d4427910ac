# SPDX-License-Identifier: Apache-2.0
"""The parts of a dense model that pruning keeps: sizes, the indices of kept parts, and the kept part of each
parameter."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.base.advice import advice, typed_as
from nemo2.base.errors import ConfigError
from nemo2.config.capture import captured_arguments, configurable
from nemo2.config.value_types import refuse_misfits
from nemo2.llm.importances import Importances
from nemo2.models.conversion.settings import windowed_layers

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
    "starcoder2",
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

    def __post_init__(self) -> None:
        refuse_misfits(type(self), vars(self), of="PruningConfig")


_OPTIONS = {
    "target_num_layers": "--layers",
    "drop_layers": "--drop",
    "target_hidden_size": "--hidden-size",
    "target_ffn_hidden_size": "--ffn-hidden-size",
    "target_num_attention_heads": "--heads",
    "target_num_query_groups": "--groups",
}
"""The options of ``nemo2 prune`` by their fields of `PruningConfig`."""
_WIDTHS = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
"""Fields of a model's configuration that make its layers narrower. In `PruningConfig` they have the prefix ``target_``."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model before and after pruning.

    Raises:
        ConfigError: as `prune`.
    """

    before: Any
    """The model's configuration."""
    to: PruningConfig

    @property
    def in_width(self) -> bool:
        """Whether layers become narrower, rather than fewer."""
        return any(getattr(self.to, f"target_{field}") is not None for field in _WIDTHS)

    def __post_init__(self) -> None:
        config, to = self.before, self.to
        family = type(config).__module__.rpartition(".")[2]
        others = config.num_moe_experts, config.mtp_num_layers, getattr(config, "multi_latent_attention", False)
        if family not in FAMILIES or any(others):
            raise ConfigError(
                f"{type(config).__name__} cannot be pruned, because its layers differ, or because it has experts, latent "
                f"attention or multi-token prediction. nemo2 prunes dense models of {', '.join(FAMILIES)}."
            )
        if all(value in (None, []) for value in asdict(to).values()):
            raise ConfigError("pruning_config sets no size, so there is nothing to prune. Set a target size.")
        for field in (*_WIDTHS, "num_layers"):
            value, there = getattr(to, f"target_{field}"), getattr(config, field)
            if value is not None and not 1 <= value <= there:
                raise ConfigError(
                    f"{_typed(f'target_{field}', value)}: must be from 1 to {there}, the size of the model."
                )
        for name in ("target_mamba_num_heads", "target_mamba_head_dim"):
            if getattr(to, name) is not None:
                raise ConfigError(f"{_typed(name, getattr(to, name))}: the model has no Mamba layers.")
        if to.drop_layers is not None and to.target_num_layers is not None:
            raise ConfigError("pruning_config.drop_layers and target_num_layers set the same thing. Keep one of them.")
        if len(dropped := to.drop_layers or ()) != len(set(dropped)):
            raise ConfigError(f"{_typed('drop_layers', dropped)}: name each layer once.")
        if any(not 1 <= layer <= config.num_layers for layer in dropped) or self.new_layers < 1:
            raise ConfigError(
                f"{_typed('drop_layers', to.drop_layers)}: layer numbers must be from 1 to {config.num_layers}, and a layer "
                "must remain."
            )
        heads, groups = self.new_heads
        if (requested := to.target_num_query_groups) is not None and requested != groups:
            raise ConfigError(
                f"{_typed('target_num_query_groups', requested)} leaves {heads} heads, but a group has at most the "
                f"{self.heads_per_group} heads that it has now. Set "
                f"{advice('--heads', 'pruning_config.target_num_attention_heads')} to at most "
                f"{requested * self.heads_per_group} too."
            )
        if heads % groups or heads // groups > self.heads_per_group:
            raise ConfigError(
                f"{_typed('target_num_attention_heads', heads)} leaves {groups} query groups, but each group must have the same "
                f"number of heads, and at most the {self.heads_per_group} heads that it has now. Set "
                f"{advice('--groups', 'pruning_config.target_num_query_groups')} too."
            )

    @property
    def heads_per_group(self) -> int:
        """The number of heads of a query group before pruning."""
        return self.before.num_attention_heads // self.before.num_query_groups

    @property
    def new_layers(self) -> int:
        """The number of layers."""
        return self.to.target_num_layers or self.before.num_layers - len(self.to.drop_layers or ())

    @property
    def new_heads(self) -> tuple[int, int]:
        """The number of heads, and of their query groups."""
        heads = self.to.target_num_attention_heads or self.before.num_attention_heads
        groups = self.to.target_num_query_groups or min(heads, self.before.num_query_groups)
        return heads, max(groups, -(-heads // self.heads_per_group))

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

    def config(self, layers: Sequence[int]) -> Any:
        """The configuration of the pruned model, of ``layers`` counted from 0: each has the window and the positions it had."""
        before = self.before
        windowed, unrotated = windowed_layers(before), getattr(before, "no_rope_freq", None)
        heads, groups = self.new_heads
        changes = {
            "num_layers": self.new_layers,
            "hidden_size": self.to.target_hidden_size or before.hidden_size,
            "ffn_hidden_size": self.to.target_ffn_hidden_size or before.ffn_hidden_size,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": before.kv_channels,
            "seq_length": before.seq_length,
        }
        if any(windowed):
            changes["window_attn_skip_freq"] = [int(windowed[layer]) for layer in layers]
        if unrotated:  # Megatron-Core has made it a list
            changes["no_rope_freq"] = [unrotated[layer] for layer in layers]
        return type(before)(**((captured_arguments(before) or {}) | changes))

    def kept(self, importances: Importances) -> "Kept":
        """The most important parts, in their original order."""
        layers = set(range(self.before.num_layers)) - {layer - 1 for layer in self.to.drop_layers or ()}
        if self.to.target_num_layers is not None:
            layers = set(_most(importances.layers, self.to.target_num_layers).tolist())
        return Kept(
            sizes=self,
            layers=sorted(layers),
            channels=_most(importances.channels, self.to.target_hidden_size or self.before.hidden_size),
            neurons=[
                _most(one, self.to.target_ffn_hidden_size or self.before.ffn_hidden_size) for one in importances.neurons
            ],
            heads=[self._heads(head) for head in importances.heads],
        )

    def _heads(self, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The kept query groups, and the kept heads in each: ``[groups]`` and ``[groups, heads of each]``."""
        heads, groups = self.new_heads
        by_group = importance.view(self.before.num_query_groups, -1)
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
            halves = tensor.chunk(2) if self.sizes.before.gated_linear_unit else (tensor,)
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
        config, each = self.sizes.before, self.sizes.heads_per_group
        blocks = tensor.view(config.num_query_groups, each + 2, config.kv_channels, *tensor.shape[1:])
        rows = [torch.cat([blocks[group][mine], blocks[group][-2:]]) for group, mine in zip(groups, heads, strict=True)]
        return torch.stack(rows).flatten(0, 2)

    def _columns_of_heads(self, layer: int) -> Tensor:
        groups, heads = self.heads[layer]
        each, width = self.sizes.heads_per_group, self.sizes.before.kv_channels
        numbers = (groups[:, None] * each + heads).flatten()
        return (numbers[:, None] * width + torch.arange(width, device=numbers.device)).flatten()


def _most(importance: Tensor, count: int) -> Tensor:
    """The indices of the most important parts, in their original order."""
    return importance.topk(count).indices.sort().values


def _typed(field: str, value: Any) -> str:
    return typed_as(f"pruning_config.{field}", value, option=_OPTIONS.get(field, ""))
