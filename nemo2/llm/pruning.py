# SPDX-License-Identifier: Apache-2.0
"""``llm.prune``: a smaller model out of a checkpoint, from the parts of it that matter most to some samples.

Importances are those of Muralidharan et al. 2024 (arXiv:2407.14679), means over all tokens of the samples: of a channel its
absolute value behind the norms, of a neuron of the feed-forward layers and of a head the size of what it gives, of a layer one
less the cosine of what goes in and what comes out. Everything runs in one process; the pruned model is then trained on, best by
`nemo2.llm.distill` with the whole one as its teacher.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from torch import Tensor

from nemo2.backend import get_backend
from nemo2.config.capture import captured_arguments, configurable
from nemo2.data.mock import MockDataModule
from nemo2.errors import ConfigError
from nemo2.llm.inference import find_checkpoint, loaded
from nemo2.llm.signatures import only_defaults
from nemo2.models.decoding import core_of
from nemo2.models.generate import evaluating
from nemo2.strategies.set_up import set_up
from nemo2.strategy import MegatronStrategy
from nemo2.trainer import Trainer

_log = logging.getLogger(__name__)
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


@configurable
@dataclass(frozen=True)
class PruningConfig:
    """The sizes of the pruned model, under NeMo 2.0's names. None leaves a size as it is."""

    target_ffn_hidden_size: Optional[int] = None
    target_hidden_size: Optional[int] = None
    target_num_attention_heads: Optional[int] = None
    target_num_query_groups: Optional[int] = None
    target_mamba_num_heads: Optional[int] = None
    target_mamba_head_dim: Optional[int] = None
    target_num_layers: Optional[int] = None
    drop_layers: Optional[list[int]] = None
    """Layers that go, counted from 1, whatever their importance."""


@configurable
def prune(
    nemo_checkpoint: str,
    save_path: str,
    pruning_config: PruningConfig,
    devices: int = 1,
    num_nodes: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    num_layers_in_first_pipeline_stage: Optional[int] = None,
    num_layers_in_last_pipeline_stage: Optional[int] = None,
    num_train_samples: int = 1024,
    data: Optional[pl.LightningDataModule] = None,
    tokenizer_path: Optional[str] = None,
    legacy_ckpt: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint of a smaller model. Parameters up to ``legacy_ckpt`` are NeMo 2.0's, in its order.

    Args:
        nemo_checkpoint: A checkpoint of a dense model, or a run's directory.
        save_path: The new checkpoint.
        pruning_config: Its sizes.
        devices, num_nodes, tp_size, pp_size, num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage,
            tokenizer_path, legacy_ckpt: Must have their defaults: one process prunes, and the tokenizer is the checkpoint's.
        num_train_samples: Of ``data``, by which importances are measured.
        data: None: random tokens, by which importances say little; enough where only ``drop_layers`` is set.
        overwrite: Replace what is there.

    Returns:
        ``save_path``.

    Raises:
        CheckpointError: no checkpoint, or none that describes its model.
        ConfigError: a size that the model can't be pruned to, or a family that isn't pruned.
    """
    only_defaults(
        "models are pruned in one process, with their own tokenizer.",
        devices=(devices, 1),
        num_nodes=(num_nodes, 1),
        tp_size=(tp_size, 1),
        pp_size=(pp_size, 1),
        num_layers_in_first_pipeline_stage=(num_layers_in_first_pipeline_stage, None),
        num_layers_in_last_pipeline_stage=(num_layers_in_last_pipeline_stage, None),
        tokenizer_path=(tokenizer_path, None),
        legacy_ckpt=(legacy_ckpt, False),
    )
    target = Path(save_path)
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} is there already: give another save_path, or overwrite=True to replace it.")
    with loaded(str(find_checkpoint(Path(nemo_checkpoint))), _trainer()) as model:
        sizes = _Sizes.of(model, pruning_config)
        samples = _samples(model, data, num_train_samples)
        kept = sizes.kept(_importances(model, samples))
        weights = {name: kept.cut(name, tensor) for name, tensor in core_of(model).named_parameters()}  # pyright: ignore
        weights = {renamed: tensor for name, tensor in weights.items() if (renamed := kept.renamed(name)) is not None}
        small = type(model)(config=sizes.config(model.config), tokenizer=model.tokenizer)
    trainer = _trainer()
    with set_up(trainer, small) as parallel, torch.no_grad():
        parameters = dict(parallel.unwrapped[0].named_parameters())
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        trainer.save_checkpoint(target, weights_only=True)
    return target


@dataclass(frozen=True)
class _Importances:
    channels: Tensor
    neurons: list[Tensor]
    """Of each layer."""
    heads: list[Tensor]
    layers: Tensor


@dataclass(frozen=True)
class _Sizes:
    """What there is and what stays."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    """Of a head."""
    gated: bool
    to: PruningConfig

    @classmethod
    def of(cls, model: Any, to: PruningConfig) -> "_Sizes":
        """
        Raises:
            ConfigError: as `prune`.
        """
        config = model.config
        family = type(config).__module__.rpartition(".")[2]
        if family not in FAMILIES or config.num_moe_experts or getattr(config, "multi_latent_attention", False):
            raise ConfigError(
                f"{type(config).__name__} isn't pruned: its layers differ, or have experts or latent attention. Pruned are dense "
                f"models of {', '.join(FAMILIES)}."
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
            raise ConfigError("pruning_config sets no size: nothing would be pruned.")
        for name, there in (
            ("target_hidden_size", self.hidden),
            ("target_ffn_hidden_size", self.ffn),
            ("target_num_attention_heads", self.heads),
            ("target_num_query_groups", self.groups),
            ("target_num_layers", self.layers),
        ):
            value = getattr(to, name)
            if value is not None and not 1 <= value <= there:
                raise ConfigError(f"pruning_config.{name}={value} must be from 1 to {there}, which the model has.")
        for name in ("target_mamba_num_heads", "target_mamba_head_dim"):
            if getattr(to, name) is not None:
                raise ConfigError(f"pruning_config.{name}={getattr(to, name)}: the model has no Mamba layers.")
        if to.drop_layers is not None and to.target_num_layers is not None:
            raise ConfigError("pruning_config.drop_layers and target_num_layers say the same: set one of them.")
        if any(not 1 <= layer <= self.layers for layer in to.drop_layers or ()):
            raise ConfigError(
                f"pruning_config.drop_layers={to.drop_layers}: layers are counted from 1 to {self.layers}."
            )
        heads, groups = self.new_heads
        if heads % groups or heads // groups > self.heads // self.groups:
            raise ConfigError(
                f"pruning_config keeps {heads} heads in {groups} groups of queries: each group needs as many, and has "
                f"{self.heads // self.groups} of them now. Set target_num_query_groups too."
            )

    @property
    def new_heads(self) -> tuple[int, int]:
        """Heads, and the groups of queries that they are in."""
        heads = self.to.target_num_attention_heads or self.heads
        most = self.heads // self.groups
        groups = self.to.target_num_query_groups or (self.groups if heads >= self.groups else heads)
        return heads, max(groups, -(-heads // most))

    def config(self, config: Any) -> Any:
        """The pruned model's."""
        heads, groups = self.new_heads
        dropped = len(set(self.to.drop_layers or ()))
        changes = {
            "num_layers": self.to.target_num_layers or self.layers - dropped,
            "hidden_size": self.to.target_hidden_size or self.hidden,
            "ffn_hidden_size": self.to.target_ffn_hidden_size or self.ffn,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": self.channels,
            "seq_length": config.seq_length,
        }
        return type(config)(**((captured_arguments(config) or {}) | changes))

    def kept(self, found: _Importances) -> "_Kept":
        """The most important parts, in their order."""
        layers = set(range(self.layers)) - {layer - 1 for layer in self.to.drop_layers or ()}
        if self.to.target_num_layers is not None:
            layers = set(_most(found.layers, self.to.target_num_layers).tolist())
        return _Kept(
            sizes=self,
            layers=sorted(layers),
            channels=_most(found.channels, self.to.target_hidden_size or self.hidden),
            neurons=[_most(one, self.to.target_ffn_hidden_size or self.ffn) for one in found.neurons],
            heads=[self._heads(one) for one in found.heads],
        )

    def _heads(self, importance: Tensor) -> tuple[Tensor, Tensor]:
        """Groups of queries, and in each the heads: ``[groups]`` and ``[groups, heads of each]``."""
        heads, groups = self.new_heads
        by_group = importance.view(self.groups, -1)
        chosen = _most(by_group.sum(-1), groups)
        return chosen, torch.stack([_most(by_group[group], heads // groups) for group in chosen])


@dataclass(frozen=True)
class _Kept:
    """The parts that stay, by their places."""

    sizes: _Sizes
    layers: list[int]
    channels: Tensor
    neurons: list[Tensor]
    heads: list[tuple[Tensor, Tensor]]

    def renamed(self, name: str) -> Optional[str]:
        """A parameter's name in the pruned model; None where its layer is gone."""
        before, found, rest = name.partition("decoder.layers.")
        if not found:
            return name
        number, _, rest = rest.partition(".")
        if int(number) not in self.layers:
            return None
        return f"{before}{found}{self.layers.index(int(number))}.{rest}"

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """What stays of a parameter."""
        tensor = tensor.detach()
        layer = int(name.partition("decoder.layers.")[2].partition(".")[0] or 0)
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
        """Rows of queries, keys and values, which stand group by group: its queries, its key, its value."""
        groups, heads = self.heads[layer]
        each = self.sizes.heads // self.sizes.groups
        blocks = tensor.view(self.sizes.groups, each + 2, self.sizes.channels, *tensor.shape[1:])
        found = [
            torch.cat([blocks[group][mine], blocks[group][-2:]]) for group, mine in zip(groups, heads, strict=True)
        ]
        return torch.stack(found).flatten(0, 2)

    def _columns_of_heads(self, layer: int) -> Tensor:
        groups, heads = self.heads[layer]
        each, width = self.sizes.heads // self.sizes.groups, self.sizes.channels
        numbers = (groups[:, None] * each + heads).flatten()
        return (numbers[:, None] * width + torch.arange(width, device=numbers.device)).flatten()


def _most(importance: Tensor, count: int) -> Tensor:
    """The places of the most important ones, in their order."""
    return importance.topk(count).indices.sort().values


def _importances(model: Any, samples: Iterable[Tensor]) -> _Importances:
    """Means over all tokens of ``samples``, each ``[batch, sequence]``."""
    core: Any = core_of(model)
    names = [name for name, _ in core.named_parameters()]
    if any(name.endswith("layer_norm_weight") for name in names):
        raise ConfigError(
            "Transformer Engine's layers have their norms inside: prune on a machine without it, where the layers are plain."
        )
    layers, config = list(core.decoder.layers), model.config
    sums: dict[Any, Tensor] = {}
    with evaluating(model), torch.no_grad(), _watching(core, layers, sums, config):
        for tokens in samples:
            tokens = tokens.to(get_backend().device)
            positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
            core(tokens, positions, None)
    return _Importances(
        channels=sums["channels"],
        neurons=[sums["neurons", place] for place in range(len(layers))],
        heads=[sums["heads", place] for place in range(len(layers))],
        layers=torch.stack([sums["layer", place] for place in range(len(layers))]),
    )


@contextmanager
def _watching(core: Any, layers: list[Any], sums: dict[Any, Tensor], config: Any) -> Iterator[None]:
    """Add up what the layers give, while this lasts."""

    def add(key: Any, value: Tensor) -> None:
        sums[key] = sums.get(key, torch.zeros_like(value)) + value

    def behind_a_norm(module: Any, inputs: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        add("channels", found.float().abs().flatten(0, -2).sum(0))

    def neurons(place: int) -> Any:
        return lambda module, inputs: add(("neurons", place), inputs[0].float().abs().flatten(0, -2).sum(0))

    def heads(place: int) -> Any:
        def told(module: Any, inputs: Any) -> None:
            each = inputs[0].float().flatten(0, -2).view(-1, config.num_attention_heads, config.kv_channels)
            add(("heads", place), each.norm(dim=-1).sum(0))

        return told

    def layer(place: int) -> Any:
        def told(module: Any, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
            before = named["hidden_states"] if "hidden_states" in named else inputs[0]
            after = output[0] if isinstance(output, tuple) else output
            alike = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            add(("layer", place), (1 - alike).sum())

        return told

    handles = [core.decoder.final_layernorm.register_forward_hook(behind_a_norm)]
    for place, one in enumerate(layers):
        handles += [
            one.input_layernorm.register_forward_hook(behind_a_norm),
            one.pre_mlp_layernorm.register_forward_hook(behind_a_norm),
            one.mlp.linear_fc2.register_forward_pre_hook(neurons(place)),
            one.self_attention.linear_proj.register_forward_pre_hook(heads(place)),
            one.register_forward_hook(layer(place), with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _samples(model: Any, data: Any, count: int) -> Iterator[Tensor]:
    """``count`` samples of the data's training set, one by one, ``[1, sequence]``."""
    if data is None:
        _log.warning("prune measures importances by random tokens: give data, samples of what the model is for.")
        data = MockDataModule(seq_length=model.config.seq_length, tokenizer=model.tokenizer, num_workers=0)
    data.trainer = model.trainer
    data.prepare_data()
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    for place in range(min(count, len(dataset))):
        yield torch.as_tensor(dataset[place]["tokens"])[None]


def _trainer() -> Trainer:
    return Trainer(strategy=MegatronStrategy(ckpt_async_save=False), devices=1, logger=False, enable_progress_bar=False)
