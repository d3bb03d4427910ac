# SPDX-License-Identifier: Apache-2.0
"""The parts of layers: attention, feed-forward blocks, experts, mixers, each with its matrices and other weights.

A part knows its linear layers by Megatron-Core's module names and their sizes over all tensor-parallel ranks. Parameters,
parameters that a token meets and products follow by summing; `nemo2.models.shape` reads the parts off a config.
"""

import dataclasses
import functools
from typing import Literal, Optional


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear layer with a weight ``[outputs, inputs]``, or ``copies`` of them: one for each routed expert.

    Attributes:
        name: module below its part, ``"linear_qkv"``; ``""`` where the part is the module.
        split: how tensor-parallel ranks share it: by outputs ("column"), by inputs ("row"), or not at all ("whole").
        met: copies that a token passes.
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
        """Multiply-adds of one token in the forward pass."""
        return self.met * self.inputs * self.outputs

    def low_rank(self, rank: int) -> int:
        """Parameters of a pair of matrices beside it, ``inputs`` to ``rank`` to ``outputs`` (LoRA, arXiv:2106.09685)."""
        return self.copies * rank * (self.inputs + self.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One residual branch of a layer, with the norms before, in and behind it.

    Attributes:
        name: module below its layer.
        hidden: width of what enters and leaves it.
        small: weights that are in no matrix: norms, sinks, convolutions, what is kept per head.
    """

    name: str
    hidden: int
    small: int = 0

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        raise TypeError(f"{type(self).__name__} says nothing of its linear layers.")

    @property
    def parameters(self) -> int:
        return self.small + sum(linear.parameters for linear in self.linears)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the routed experts those it is sent to."""
        return self.parameters - sum(
            linear.parameters // linear.copies * (linear.copies - linear.met) for linear in self.linears
        )

    def products(self, keys: float) -> float:
        """Multiply-adds of one token in the forward pass. ``keys``: how many other tokens a token sees on average."""
        return sum(linear.products for linear in self.linears) + self.mixing(keys)

    def mixing(self, keys: float) -> float:
        """Multiply-adds between tokens, of one token in the forward pass."""
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Part):
    """Queries of ``heads``, keys and values of ``groups``, each head of ``head_dim`` channels.

    Attributes:
        window: tokens that a query sees, itself included; None where it sees all before it.
        gated: the output is multiplied by a gate, which the first product computes too.
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
        """Channels of all heads that attention gives out."""
        return self.query_width

    @property
    def kv_width(self) -> int:
        """Channels of a token's keys and values."""
        return 2 * self.groups * self.head_dim

    @property
    def score_channels(self) -> int:
        """Channels of a head that meet in a score, and that are weighted by it."""
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
        head_dim: channels of a head without the rotary ones beside them.
        rope_dim: rotary channels of a head.
        value_dim: channels of a head's values.
        query_rank: width of the queries' latent; 0 where they have none.
        latent: width of the latent of keys and values.
        index_heads, index_dim, index_keys: of DeepSeek's sparse attention (DeepSeek-V3.2-Exp's report, section 2): the
            indexer's heads, their channels, and how many keys it chooses; 0 without.
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
        """Channels of all heads of a query, the rotary ones left out."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Channels of all heads that attention gives out."""
        return self.heads * self.value_dim

    @property
    def kv_width(self) -> int:
        """Channels of a token's keys and values, which are written out for every head."""
        return self.query_width + self.value_width

    @property
    def score_channels(self) -> int:
        """Channels of a head that meet in a score, and that are weighted by it."""
        return self.head_dim + self.rope_dim + self.value_dim

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        hidden, queries = self.hidden, self.query_width + self.heads * self.rope_dim
        found = [Linear("linear_q_proj", hidden, queries)]
        if self.query_rank:
            found = [
                Linear("linear_q_down_proj", hidden, self.query_rank, "whole"),
                Linear("linear_q_up_proj", self.query_rank, queries),
            ]
        found += [
            Linear("linear_kv_down_proj", hidden, self.latent + self.rope_dim, "whole"),
            Linear("linear_kv_up_proj", self.latent, self.kv_width),
            Linear("linear_proj", self.value_width, hidden, "row", bias=self.bias),
        ]
        if self.index_heads:
            indexer, width = "core_attention.indexer", self.index_heads * self.index_dim
            found += [
                Linear(f"{indexer}.linear_wq_b", self.query_rank or hidden, width, "whole"),
                Linear(f"{indexer}.linear_wk", hidden, self.index_dim, "whole"),
                Linear(f"{indexer}.linear_weights_proj", hidden, self.index_heads, "whole"),
            ]
        return tuple(found)

    def mixing(self, keys: float) -> float:
        seen = min(keys, self.index_keys) if self.index_heads else keys
        return seen * self.heads * self.score_channels + keys * self.index_heads * self.index_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(Part):
    """A feed-forward block ``width`` wide inside; gated (SwiGLU and the like), its first matrix is twice as wide."""

    width: int
    gated: bool = False
    bias: bool = False

    @property
    def inner(self) -> int:
        """Channels behind the first product."""
        return (2 if self.gated else 1) * self.width

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (
            Linear("linear_fc1", self.hidden, self.inner, bias=self.bias),
            Linear("linear_fc2", self.width, self.hidden, "row", bias=self.bias),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """``count`` routed experts, of which a token goes to ``topk``, and those that every token passes.

    Attributes:
        width: of one routed expert.
        latent: width of the space that routed experts work in (a projection there and back); 0: the layer's own.
        shared: the shared experts as one feed-forward block; None without.
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
        """Channels of one expert behind its first product."""
        return (2 if self.gated else 1) * self.width

    @property
    def outer(self) -> int:
        """Channels of what is sent to an expert."""
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
        """Weights that expert-parallel ranks share."""
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
        """As every part's; the router's, below a thousandth, are left out by convention (`nemo2.models.flops`)."""
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
    def beside(self) -> int:
        """Channels of B, C and the step sizes together."""
        return 2 * self.groups * self.states + self.heads

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (
            Linear("in_proj", self.hidden, 2 * self.inner + self.beside),
            Linear("out_proj", self.inner, self.hidden, "row"),
        )

    def mixing(self, keys: float) -> float:
        """Per head of P channels and N states, ``B x`` adds to the state and ``C h`` reads it (equation 1): N P each.

        The chunked algorithm of the kernels does more, and that is not counted.
        """
        return 2 * self.inner * self.states


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet(Part):
    """Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, section 3."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return (
            Linear("in_proj", self.hidden, 2 * keys + 2 * values + 2 * self.value_heads),  # q k v gate beta alpha
            Linear("out_proj", values, self.hidden, "row"),
        )

    def mixing(self, keys: float) -> float:
        """Per value head the state is read for the key, corrected, and read for the query (equation 10)."""
        return 3 * self.value_heads * self.key_dim * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection(Part):
    """One matrix: of a further prediction, which makes one hidden state of two; or in place of attention or feed-forward."""

    inputs: int
    bias: bool = False

    @property
    def joins(self) -> bool:
        """Whether two states become one."""
        return self.inputs != self.hidden

    @functools.cached_property
    def linears(self) -> tuple[Linear, ...]:
        return (Linear("", self.inputs, self.hidden, bias=self.bias),)
