# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder that its speed and memory depend on, and what they give: weights and FLOPs."""

import dataclasses
from typing import Optional


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only model: dense, of experts, or a hybrid with Mamba mixers. Fields that it has no use for are 0.

    Attributes:
        layers: decoder layers, further predictions not counted.
        ffn: width of the dense feed-forward layer.
        vocab: rows of the embedding, padding included.
        gated: SwiGLU and the like, three matrices rather than two.
        experts: routed experts of a layer.
        topk: experts a token goes to.
        moe_ffn: width of one expert.
        shared_ffn: width of the shared experts together.
        dense_layers: how many of the layers are dense in a model of experts.
        q_lora, kv_lora, rope_dim: ranks of latent attention and the width of its rotary part.
        mtp: depth of multi-token prediction.
        window, windowed: tokens that attention looks back, and in how many of the layers.
        attention_layers, mlp_layers: of a hybrid, whose layers do one thing each. None: every layer has both.
        mixers, mixer_inner, mixer_state: Mamba mixers, their width, and their states per unit of width.
        mixer_bc: width of a mixer's B, C and step size together.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    mtp: int = 0
    window: int = 0
    windowed: int = 0
    attention_layers: Optional[int] = None
    mlp_layers: Optional[int] = None
    mixers: int = 0
    mixer_inner: int = 0
    mixer_state: int = 0
    mixer_bc: int = 0

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def kv_width(self) -> int:
        """Keys and values of a token together; latent attention writes them out for every head."""
        return 2 * (self.heads if self.kv_lora else self.kv_heads) * self.head_dim

    @property
    def attentions(self) -> int:
        """Layers with attention, one more for each further prediction."""
        return (self.layers if self.attention_layers is None else self.attention_layers) + self.mtp

    @property
    def moe_layers(self) -> int:
        """Layers with experts. A further prediction is made by a layer like the last."""
        return self.layers - self.dense_layers + self.mtp if self.experts else 0

    @property
    def mlps(self) -> int:
        """Layers with a dense feed-forward part."""
        if self.mlp_layers is not None:
            return self.mlp_layers
        return self.layers + self.mtp - self.moe_layers

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        h, width = self.hidden, self.heads * self.head_dim
        if not self.kv_lora:
            return h * (2 * width + 2 * self.kv_heads * self.head_dim)
        query = self.heads * (self.head_dim + self.rope_dim)
        queries = h * self.q_lora + self.q_lora * query if self.q_lora else h * query
        return queries + h * (self.kv_lora + self.rope_dim) + self.kv_lora * 2 * width + width * h

    @property
    def mlp_parameters(self) -> int:
        """Weights of one dense feed-forward layer."""
        return self.matrices * self.hidden * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Weights of all routed experts of one layer."""
        return self.experts * self.matrices * self.hidden * self.moe_ffn

    @property
    def shared_parameters(self) -> int:
        """Weights of a layer of experts that every token meets: the router and the shared experts."""
        return self.hidden * self.experts + self.matrices * self.hidden * self.shared_ffn

    @property
    def mixer_parameters(self) -> int:
        """Weights of one Mamba mixer's projections; its convolution and norms are left out."""
        return self.hidden * (2 * self.mixer_inner + self.mixer_bc) + self.mixer_inner * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def blocks(self) -> float:
        """Weights outside of the embeddings and of the routed experts."""
        return (
            self.attentions * self.attention_parameters
            + self.mlps * self.mlp_parameters
            + self.moe_layers * self.shared_parameters
            + self.mixers * self.mixer_parameters
            + self.mtp * 2 * self.hidden**2
        )

    @property
    def parameters(self) -> float:
        """All weights; norms and biases, below a thousandth, are left out."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.blocks + self.moe_layers * self.expert_parameters + embeddings

    def seen(self, seq: int) -> float:
        """Keys that a query meets on average of the layers, as a share of ``seq``: the whole square is 1."""
        if not (self.window and self.windowed):
            return 1.0
        # A window sees at most its own width; a causal half of the square is 1 here, so a window counts twice.
        return 1.0 - self.windowed / self.layers * (1.0 - min(1.0, 2 * self.window / seq))

    def model_flops_per_token(self, seq: int, *, causal: bool = True) -> float:
        """FLOPs of a training step per token, three times the forward's (PaLM, appendix B; recomputation not counted).

        ``causal`` counts the half of the score matrix that a causal model needs; without it, the whole. Windows count as if
        they saw everything, as `nemo2.models.flops` has it.
        """
        h, f = self.hidden, self.matrices * self.hidden
        active = self.blocks - self.moe_layers * h * self.experts  # the router is left out there, and so here
        active += self.moe_layers * self.topk * f * self.moe_ffn
        active += (1 + self.mtp) * self.embedding_parameters + 2 * self.mixers * self.mixer_inner * self.mixer_state
        scores = self.heads * (2 * self.head_dim + self.rope_dim) * seq * self.attentions * (0.5 if causal else 1.0)
        return 3 * 2 * (active + scores)
