# SPDX-License-Identifier: Apache-2.0
"""The parts of layers: attention, feed-forward blocks, experts, mixers, each with its matrices and other weights.

A part lists its linear layers by Megatron-Core's module names, with their sizes over all tensor-parallel ranks. The
numbers of parameters, of parameters that a token uses, and of products follow by summation. `nemo2.models.shape` reads
the parts from a config.
"""

import dataclasses
import functools
from typing import Literal, Optional


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear layer with a weight ``[outputs, inputs]``, or ``copies`` of it: one for each routed expert.

    Attributes:
        name: the module below its part, ``"linear_qkv"``. ``""``: the part is the module.
        split: the dimension that tensor-parallel ranks shard: outputs ("column"), inputs ("row"), or none ("whole").
        met: the number of copies that a token uses.
    """

    name: str
    inputs: int
    outputs: int
    split: Literal["column", "row", "whole"] = "column"
    bias: bool = False
    copies: int = 1
    met: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * self.outputs * (self.inputs + self.bias)

    @property
    def products(self) -> int:
        """Multiply-adds per token in the forward."""
        return self.met * self.inputs * self.outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One residual branch of a layer, with the norms before, inside and after it.

    Attributes:
        name: the module below its layer.
        hidden: the width of its input and output.
        small: weights outside matrices: norms, sinks, convolutions, values per head.
    """

    name: str
    hidden: int
    small: int = 0

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        raise TypeError(f"{type(self).__name__} doesn't define its linear layers.")

    @property
    def parameters(self) -> int:
        return self.small + sum(linear.parameters for linear in self.linears)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses, including those of its routed experts."""
        return self.parameters - sum(
            linear.parameters // linear.copies * (linear.copies - linear.met) for linear in self.linears
        )

    def products(self, keys: float) -> float:
        """Multiply-adds per token in the forward. ``keys`` is the mean number of other tokens that a token attends
        to."""
        return sum(linear.products for linear in self.linears) + self.mixing(keys)

    def mixing(self, keys: float) -> float:
        """Multiply-adds between tokens, per token in the forward."""
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Part):
    """Queries of ``heads``, keys and values of ``groups``, with ``head_dim`` channels per head.

    Attributes:
        window: tokens that a query attends to, including its own. None: all previous tokens.
        gated: the output is multiplied by a gate, which the first product also computes.
    """

    heads: int
    groups: int
    head_dim: int
    window: Optional[int] = None
    gated: bool = False
    qkv_bias: bool = False
    bias: bool = False

    @property
    def query_width(self) -> int:
        """Channels of all heads of a query."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Channels of all heads in the output of attention."""
        return self.query_width

    @property
    def kv_width(self) -> int:
        """Channels of a token's keys and values."""
        return 2 * self.groups * self.head_dim

    @property
    def score_channels(self) -> int:
        """Channels of a head in a score, and those weighted by it."""
        return 2 * self.head_dim

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        qkv = self.query_width * (2 if self.gated else 1) + self.kv_width
        return (
            Linear("linear_qkv", self.hidden, qkv, bias=self.qkv_bias),
            Linear("linear_proj", self.query_width, self.hidden, "row", bias=self.bias),
        )

    def mixing(self, keys: float) -> float:
        return keys * self.heads * self.score_channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention(Part):
    """Keys and values of all heads from one latent: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Attributes:
        head_dim: channels of a head without the rotary channels.
        rope_dim: rotary channels of a head.
        value_dim: channels of a head's values.
        query_rank: the width of the queries' latent. 0: they have none.
        latent: the width of the latent of keys and values.
        index_heads, index_dim, index_keys: for DeepSeek's sparse attention (DeepSeek-V3.2-Exp's report, section 2): the
            indexer's heads, their channels, and the number of keys that it selects. 0: no indexer.
        window: as in `Attention`.
    """

    heads: int
    head_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int
    latent: int
    bias: bool = False
    index_heads: int = 0
    index_dim: int = 0
    index_keys: int = 0
    window: Optional[int] = None

    @property
    def query_width(self) -> int:
        """Channels of all heads of a query, without the rotary channels."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Channels of all heads in the output of attention."""
        return self.heads * self.value_dim

    @property
    def kv_width(self) -> int:
        """Channels of a token's keys and values, which are stored for every head."""
        return self.query_width + self.value_width

    @property
    def score_channels(self) -> int:
        """Channels of a head in a score, and those weighted by it."""
        return self.head_dim + self.rope_dim + self.value_dim

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        hidden, queries = self.hidden, self.query_width + self.heads * self.rope_dim
        linears = [Linear("linear_q_proj", hidden, queries)]
        if self.query_rank:
            linears = [
                Linear("linear_q_down_proj", hidden, self.query_rank, "whole"),
                Linear("linear_q_up_proj", self.query_rank, queries),
            ]
        linears += [
            Linear("linear_kv_down_proj", hidden, self.latent + self.rope_dim, "whole"),
            Linear("linear_kv_up_proj", self.latent, self.kv_width),
            Linear("linear_proj", self.value_width, hidden, "row", bias=self.bias),
        ]
        if self.index_heads:
            indexer, width = "core_attention.indexer", self.index_heads * self.index_dim
            linears += [
                Linear(f"{indexer}.linear_wq_b", self.query_rank or hidden, width, "whole"),
                Linear(f"{indexer}.linear_wk", hidden, self.index_dim, "whole"),
                Linear(f"{indexer}.linear_weights_proj", hidden, self.index_heads, "whole"),
            ]
        return tuple(linears)

    def mixing(self, keys: float) -> float:
        seen = min(keys, self.index_keys) if self.index_heads else keys
        return seen * self.heads * self.score_channels + keys * self.index_heads * self.index_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(Part):
    """A feed-forward block with an inner width of ``width``. With a gate (SwiGLU and similar), its first matrix is
    twice as wide."""

    width: int
    gated: bool = False
    bias: bool = False

    @property
    def inner(self) -> int:
        """Channels after the first product."""
        return (2 if self.gated else 1) * self.width

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (
            Linear("linear_fc1", self.hidden, self.inner, bias=self.bias),
            Linear("linear_fc2", self.width, self.hidden, "row", bias=self.bias),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """``count`` routed experts, ``topk`` of which a token uses, and the shared experts.

    Attributes:
        width: the width of one routed expert.
        latent: the width of the space in which routed experts work, with a projection to it and back. 0: the layer's
            own.
        shared: the shared experts as one feed-forward block. None: there are none.
    """

    count: int
    topk: int
    width: int
    gated: bool = False
    bias: bool = False
    latent: int = 0
    shared: Optional[MLP] = None

    @property
    def inner(self) -> int:
        """Channels of one expert after its first product."""
        return (2 if self.gated else 1) * self.width

    @property
    def outer(self) -> int:
        """Channels of an expert's input."""
        return self.latent or self.hidden

    @property
    def routed(self) -> tuple[Linear, ...]:
        """The linear layers of the routed experts."""
        several = {"bias": self.bias, "copies": self.count, "met": self.topk}
        return (
            Linear("experts.linear_fc1", self.outer, self.inner, **several),
            Linear("experts.linear_fc2", self.width, self.outer, "row", **several),
        )

    @property
    def routed_parameters(self) -> int:
        """The weights that expert-parallel ranks distribute."""
        return sum(linear.parameters for linear in self.routed)

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        around: tuple[Linear, ...] = (Linear("router", self.hidden, self.count, "whole", bias=self.bias),)
        if self.latent:
            around += (
                Linear("fc1_latent_proj", self.hidden, self.latent, "whole", bias=self.bias),
                Linear("fc2_latent_proj", self.latent, self.hidden, "whole", bias=self.bias),
            )
        beside: tuple[Linear, ...] = ()
        if self.shared is not None:
            name = self.shared.name
            beside = tuple(dataclasses.replace(linear, name=f"{name}.{linear.name}") for linear in self.shared.linears)
        return (*around, *self.routed, *beside)

    def products(self, keys: float) -> float:
        """As in every part. The router's products, below a thousandth, are left out by convention
        (`nemo2.models.flops`)."""
        return super().products(keys) - self.hidden * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer(Part):
    """A Mamba 2 mixer: Dao and Gu 2024, arXiv:2405.21060, section 7.

    ``B`` and ``C`` have ``states`` channels in each of ``groups``; ``heads`` heads of ``head_dim`` channels share them.
    """

    heads: int
    head_dim: int
    states: int
    groups: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def sections(self) -> dict[str, int]:
        """Channels of each part of the first product, which checkpoints store separately."""
        states = self.groups * self.states
        return {"z": self.inner, "x": self.inner, "B": states, "C": states, "dt": self.heads}

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (
            Linear("in_proj", self.hidden, sum(self.sections.values())),
            Linear("out_proj", self.inner, self.hidden, "row"),
        )

    def mixing(self, keys: float) -> float:
        """Per head of P channels and N states, ``B x`` adds to the state and ``C h`` reads it (equation 1): N P each.

        The chunked algorithm of the kernels does more operations, which are not counted.
        """
        return 2 * self.inner * self.states


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet(Part):
    """Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, section 3."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def sections(self) -> dict[str, int]:
        """As in `Mixer`."""
        keys, heads = self.key_heads * self.key_dim, self.value_heads
        values = heads * self.value_dim
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (
            Linear("in_proj", self.hidden, sum(self.sections.values())),
            Linear("out_proj", self.value_heads * self.value_dim, self.hidden, "row"),
        )

    def mixing(self, keys: float) -> float:
        """Per value head the state is read for the key, corrected, and read for the query (equation 10)."""
        return 3 * self.value_heads * self.key_dim * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection(Part):
    """One matrix: it joins two hidden states into one for multi-token prediction, or replaces attention or
    feed-forward."""

    inputs: int
    bias: bool = False

    @property
    def joins(self) -> bool:
        """Whether the layer joins two states into one."""
        return self.inputs != self.hidden

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (Linear("", self.inputs, self.hidden, bias=self.bias),)
