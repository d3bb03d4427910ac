# SPDX-License-Identifier: Apache-2.0
"""The shape of a model: its layers in order, each with its parts.

`nemo2.models.walker.shape_of` reads it off a config. It answers how many parameters there are, how many of them a token
meets, how many FLOPs training takes, and which linear layers an adapter can be put beside.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nemo2.models.parts import Experts, Linear, Mixer, Part, Projection

# Forward, gradient of the input, gradient of the weight; two operations per multiply-add.
_TRAINING = 3 * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer under Megatron-Core's module name; ``repeats``: it computes with the weights of the layer before it."""

    name: str
    parts: tuple[Part, ...]
    repeats: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder.

    Attributes:
        vocab: rows of the embedding, padding included.
        layers: of the decoder, in order.
        further: of multi-token prediction, one a depth.
        tied: the output layer is the embedding.
        positions: rows of learned positions.
        final_norm: weights of the norm behind the last layer, and of others outside of layers.
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
        """Each different part, those of further predictions included, and how many there are."""
        return Counter(part for layer in (*self.layers, *self.further) for part in layer.parts)

    def parts_of(self, indices: Iterable[int]) -> Mapping[Part, int]:
        """As `parts`, of these layers of the decoder only."""
        return Counter(part for index in indices for part in self.layers[index].parts)

    @functools.cached_property
    def experts(self) -> int:
        """Routed experts of a layer; 0 in a model without."""
        return max((part.count for part in self.parts if isinstance(part, Experts)), default=0)

    @functools.cached_property
    def mixers(self) -> int:
        """Layers with a Mamba mixer."""
        return sum(count for part, count in self.parts.items() if isinstance(part, Mixer))

    @functools.cached_property
    def blocks(self) -> int:
        """Residual branches: attention, feed-forward, experts or mixers; joining two states for a further prediction is none."""
        joining = sum(count for part, count in self.parts.items() if isinstance(part, Projection) and part.joins)
        return sum(self.parts.values()) - joining

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding's matrix, and of an output layer's."""
        return self.vocab * self.hidden

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Weights of all layers, those of further predictions included."""
        layers = (layer for layer in (*self.layers, *self.further) if not layer.repeats)
        return sum(part.parameters for layer in layers for part in layer.parts)

    @functools.cached_property
    def routed_parameters(self) -> int:
        """The parameters of routed experts."""
        layers = (layer for layer in (*self.layers, *self.further) if not layer.repeats)
        return sum(part.routed_parameters for layer in layers for part in layer.parts if isinstance(part, Experts))

    @property
    def parameters(self) -> int:
        """All weights; a tied embedding counts once."""
        outside = (1 if self.tied else 2) * self.embedding_parameters + self.positions * self.hidden + self.final_norm
        return self.layer_parameters + outside

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets: of the routed experts those it is sent to, the rest whole."""
        return self.parameters - sum(
            count * (part.parameters - part.active_parameters) for part, count in self.parts.items()
        )

    @property
    def dense_parameters(self) -> int:
        """Weights of layers outside of the routed experts."""
        return self.layer_parameters - self.routed_parameters

    def flops_per_token(self, seq_length: int, *, causal: bool = True) -> float:
        """Training FLOPs per token of a sample of ``seq_length``, by the conventions of `nemo2.models.flops`."""
        keys = seq_length / 2 if causal else seq_length
        products = sum(count * part.products(keys) for part, count in self.parts.items())
        return float(_TRAINING * (products + (1 + len(self.further)) * self.embedding_parameters))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every linear layer of the decoder and of further predictions, under its module's full name, in order."""
        for layer in (*self.layers, *self.further):
            if not layer.repeats:
                for part in layer.parts:
                    for linear in part.linears:
                        yield ".".join(filter(None, (layer.name, part.name, linear.name))), linear

    def low_rank_parameters(self, rank: int, meant: Callable[[str], object]) -> int:
        """Parameters to train where everything is frozen but pairs of matrices of ``rank`` beside the layers whose full names
        ``meant`` takes."""
        return sum(linear.low_rank(rank) for name, linear in self.linears() if meant(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sizes, and each kind of part with how often it occurs."""
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
