# SPDX-License-Identifier: Apache-2.0
"""The shape of a model: its layers in order, each with its parts.

`nemo2.models.walker.shape_of` derives it from a config. It counts parameters, the parameters that a token uses,
training FLOPs, and the linear layers that can have an adapter.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemo2.models.parts import DeltaNet, Experts, Linear, Mixer, Part, Projection

# Forward, gradient of the input, gradient of the weight; two operations per multiply-add.
_TRAINING = 3 * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer under Megatron-Core's module name. ``repeats``: it uses the weights of the layer before it."""

    name: str
    parts: tuple[Part, ...]
    repeats: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a decoder.

    Attributes:
        hidden: the hidden size.
        vocab: the rows of the embedding, including padding.
        layers: the decoder's layers, in order.
        further: the layers of multi-token prediction, one per depth.
        tied: whether the output layer is the embedding.
        positions: the rows of learned positions.
        final_norm: the weights of the norm after the last layer, and of other norms outside layers.
    """

    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    further: tuple[Layer, ...] = ()
    tied: bool = False
    positions: int = 0
    final_norm: int = 0

    @functools.cached_property
    def parts(self) -> Mapping[Part, int]:
        """Each different part and its number, including multi-token prediction."""
        return Counter(part for layer in (*self.layers, *self.further) for part in layer.parts)

    def parts_of(self, indices: Iterable[int]) -> Mapping[Part, int]:
        """`parts` for these decoder layers only."""
        return Counter(part for index in indices for part in self.layers[index].parts)

    @functools.cached_property
    def experts(self) -> int:
        """The routed experts per layer. 0: the model has none."""
        return max((part.count for part in self.parts if isinstance(part, Experts)), default=0)

    @functools.cached_property
    def mixers(self) -> int:
        """The number of layers with a Mamba mixer."""
        return sum(count for part, count in self.parts.items() if isinstance(part, Mixer))

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have a state in place of attention to all tokens: mixers or linear attention."""
        return any(isinstance(part, Mixer | DeltaNet) for part in self.parts)

    @functools.cached_property
    def blocks(self) -> int:
        """The number of residual branches: attention, feed-forward, experts or mixers. The projection that joins two
        states for multi-token prediction doesn't count."""
        joining = sum(count for part, count in self.parts.items() if isinstance(part, Projection) and part.joins)
        return sum(self.parts.values()) - joining

    @property
    def embedding_parameters(self) -> int:
        """The weights of the embedding's matrix, and of the output layer's."""
        return self.vocab * self.hidden

    @functools.cached_property
    def layer_parameters(self) -> int:
        """The weights of all layers, including multi-token prediction."""
        layers = (layer for layer in (*self.layers, *self.further) if not layer.repeats)
        return sum(part.parameters for layer in layers for part in layer.parts)

    @functools.cached_property
    def routed_parameters(self) -> int:
        """The parameters of routed experts."""
        layers = (layer for layer in (*self.layers, *self.further) if not layer.repeats)
        return sum(part.routed_parameters for layer in layers for part in layer.parts if isinstance(part, Experts))

    @property
    def parameters(self) -> int:
        """The number of weights. A tied embedding counts once."""
        outside = (1 if self.tied else 2) * self.embedding_parameters + self.positions * self.hidden + self.final_norm
        return self.layer_parameters + outside

    @property
    def active_parameters(self) -> int:
        """The weights that one token uses: those of its routed experts, and all other weights."""
        return self.parameters - sum(
            count * (part.parameters - part.active_parameters) for part, count in self.parts.items()
        )

    @property
    def dense_parameters(self) -> int:
        """The weights of layers outside the routed experts."""
        return self.layer_parameters - self.routed_parameters

    def flops_per_token(self, seq_length: int, *, causal: bool = True) -> float:
        """The training FLOPs per token of a sample of ``seq_length`` tokens, by the conventions of
        `nemo2.models.flops`."""
        keys = seq_length / 2 if causal else seq_length
        products = sum(count * part.products(keys) for part, count in self.parts.items())
        return float(_TRAINING * (products + (1 + len(self.further)) * self.embedding_parameters))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every linear layer of the decoder and of multi-token prediction, under its module's full name, in order."""
        for layer in (*self.layers, *self.further):
            if not layer.repeats:
                for part in layer.parts:
                    for linear in part.linears:
                        yield ".".join(filter(None, (layer.name, part.name, linear.name))), linear

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sizes, and each kind of part with its number."""
        kinds = [
            {"kind": type(part).__name__, "count": count, **dataclasses.asdict(part)}
            for part, count in self.parts.items()
        ]
        return {
            "hidden": self.hidden,
            "vocab": self.vocab,
            "layers": len(self.layers),
            "further": len(self.further),
            "tied": self.tied,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "parts": kinds,
        }
