# SPDX-License-Identifier: Apache-2.0
"""Derives the shape of a model from its config: dense, with experts, latent, windowed, heterogeneous or hybrid.

It only reads attributes, so it accepts a built config of nemo2 or Megatron-Core and a config tree. A missing field has
Megatron-Core's default. The weights of the parts are those that Megatron-Core builds.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.models.hybrid_pattern import hybrid_pattern
from nemo2.models.parts import MLP, Attention, DeltaNet, Experts, LatentAttention, Mixer, Part, Projection
from nemo2.models.shape import Layer, ModelShape

_CONVOLUTION = 4
"""Tokens that the convolution of a Mamba 2 mixer spans in Megatron-Core."""


def shape_of(config: Any, vocab_size: Optional[int] = None) -> ModelShape:
    """The shape of the model that ``config`` describes.

    Heterogeneous layers are included once the config is built. ``vocab_size`` is the number of rows of the embedding,
    including padding. None: ``config.vocab_size``; if that is None too, the embedding has no rows.

    Raises:
        ConfigError: a hybrid pattern that Megatron-Core does not support, or a kind of attention without a formula.
    """
    read = _Reader(config)
    learned = read("position_embedding_type", "learned_absolute") == "learned_absolute"
    layers = tuple(
        Layer(name=f"decoder.layers.{index}", parts=tuple(parts)) for index, parts in enumerate(read.decoder())
    )
    return ModelShape(
        hidden=config.hidden_size,
        vocab=vocab_size or read("vocab_size") or 0,
        layers=layers,
        further=tuple(read.predictions(layers[-1].parts)),
        tied=bool(read("share_embeddings_and_output_weights", False)),
        positions=read("seq_length", 0) if learned else 0,
        final_norm=read.norm(config.hidden_size),
    )


def linear_layers(config: Any) -> Optional[dict[str, tuple[int, int]]]:
    """The outputs and inputs, over all ranks, of every linear layer of the model, by full name. Routers are none: they have
    a class of their own. None: ``config`` isn't a transformer's."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not isinstance(config, TransformerConfig):
        return None
    shape = shape_of(config)
    linears = ((name, linear) for name, linear in shape.linears() if not name.endswith(".router"))
    layers = {name: (linear.outputs, linear.inputs) for name, linear in linears}
    return layers if shape.tied else {**layers, "output_layer": (shape.vocab or shape.hidden, shape.hidden)}


def linear_attention_layers(config: Any) -> list[bool]:
    """Which layers have linear attention, by ``linear_attention_freq``: all except every n-th, or a pattern."""
    layers: int = config.num_layers
    frequency: Any = getattr(config, "linear_attention_freq", None)
    if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
        return [False] * layers
    if isinstance(frequency, int):
        return [bool((index + 1) % frequency) for index in range(layers)]
    return list(map(bool, frequency))


def expert_layers(config: Any) -> list[bool]:
    """Which layers have experts, by ``moe_layer_freq``: every n-th from the first on, or a pattern."""
    layers, frequency = config.num_layers, getattr(config, "moe_layer_freq", 1)
    if not getattr(config, "num_moe_experts", None):
        return [False] * layers
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(layers)]
    return list(map(bool, frequency))


class _Reader:
    """A config, and the parts that its fields describe."""

    def __init__(self, config: Any):
        self.config = config
        self.hidden: int = config.hidden_size

    def __call__(self, name: str, default: Any = None) -> Any:
        return getattr(self.config, name, default)

    # ------------------------------------------------------------------------------------------------------------ layers

    def decoder(self) -> Iterator[Sequence[Part]]:
        """The parts of each layer, in order."""
        pattern = hybrid_pattern(self.config)
        if pattern is not None:
            return ([self.hybrid(kind)] for kind in pattern.decoder)
        if (blocks := self("per_block_parameters")) is not None:
            return map(self.block, blocks)
        linear = linear_attention_layers(self.config)
        return (
            [self.delta_net() if linear[index] else self.attention(index), self.experts() if expert else self.mlp()]
            for index, expert in enumerate(expert_layers(self.config))
        )

    def predictions(self, last: Sequence[Part]) -> Iterator[Layer]:
        """The depths of multi-token prediction: the projection that joins two hidden states, and a layer like the
        decoder's ``last``, or the layers in a hybrid's pattern."""
        joined = Projection(
            name="eh_proj", hidden=self.hidden, inputs=2 * self.hidden, small=3 * self.norm(self.hidden)
        )
        depths: list[Sequence[Part]] = [[_below(mtp_layer_name(), part) for part in last]] * (
            self("mtp_num_layers") or 0
        )
        pattern = hybrid_pattern(self.config)
        if pattern is not None:
            depths = [
                [_below(f"{mtp_layer_name()}.layers.{index}", self.hybrid(kind)) for index, kind in enumerate(kinds)]
                for kinds in pattern.further
            ]
        for depth, parts in enumerate(depths):
            repeats = depth > 0 and bool(self("mtp_use_repeated_layer", False))
            yield Layer(name=f"mtp.layers.{0 if repeats else depth}", parts=(joined, *parts), repeats=repeats)

    def hybrid(self, kind: str) -> Part:
        """A layer of a hybrid, which has one part."""
        if kind == "M":
            return self.mixer()
        if kind == "*":
            return self.full_attention(qk_norm=False)
        if kind in ("+", "D"):
            return self.latent_attention(qk_norm=False, sparse=kind == "D")
        if kind == "G":
            return self.delta_net()
        if kind in ("-", "E"):
            return self.experts() if kind == "E" else self.mlp()
        raise ConfigError(
            f"model.config.hybrid_override_pattern={self.config.hybrid_override_pattern!r} contains an unknown layer "
            f"{kind!r}. Known layers are M (mixer), * + D (attention, latent, sparse), G (gated DeltaNet), - "
            "(feed-forward) and E (experts)."
        )

    def block(self, block: Any) -> list[Part]:
        """A layer of Megatron-Core's heterogeneous blocks, whose parts may be missing or a single matrix."""
        bias, norm, parts = self("add_bias_linear", True), self.norm(self.hidden), []
        attention, mlp = block.attention, block.mlp
        single = {"hidden": self.hidden, "inputs": self.hidden, "bias": bias, "small": norm}
        if attention.replace_with_linear and not attention.no_op:
            parts.append(Projection(name="self_attention", **single))
        elif not attention.no_op:
            parts.append(self.full_attention(groups=attention.num_query_groups))
        if mlp.replace_with_linear and not mlp.no_op:
            parts.append(Projection(name="mlp", **single))
        elif not mlp.no_op:
            parts.append(self.mlp(mlp.ffn_hidden_size))
        return parts

    # ------------------------------------------------------------------------------------------------------------- parts

    def attention(self, index: int) -> Part:
        variant, latent = self("experimental_attention_variant"), self("multi_latent_attention", False)
        if variant not in (None, "gated_delta_net", "dsa"):
            raise ConfigError(
                f"model.config.experimental_attention_variant={variant!r}: nemo2 has no formula for its layers. Known "
                "variants are gated_delta_net and dsa."
            )
        window = self.window(index)
        return (
            self.latent_attention(sparse=variant == "dsa", window=window)
            if latent
            else self.full_attention(window=window)
        )

    def full_attention(
        self, *, groups: Optional[int] = None, window: Optional[int] = None, qk_norm: bool = True
    ) -> Attention:
        heads: int = self.config.num_attention_heads
        head_dim = self("kv_channels") or self.hidden // heads
        bias = bool(self("add_bias_linear", True))
        normed = 2 * self.norm(head_dim) if qk_norm and self("qk_layernorm", False) else 0
        if normed and self("qk_layernorm_over_heads", False):
            normed = self.norm((heads + (groups or self("num_query_groups") or heads)) * head_dim)
        return Attention(
            name="self_attention",
            hidden=self.hidden,
            small=self.around() + self.shared_norm() + normed + self.sinks(),
            heads=heads,
            groups=groups or self("num_query_groups") or heads,
            head_dim=head_dim,
            window=window,
            gated=bool(self("attention_output_gate", False)),
            qkv_bias=bias or bool(self("add_qkv_bias", False)),
            bias=bias,
        )

    def latent_attention(
        self, *, qk_norm: bool = True, sparse: bool = False, window: Optional[int] = None
    ) -> LatentAttention:
        config, rank = self.config, self("q_lora_rank") or 0
        normed = qk_norm and self("qk_layernorm", False)
        indexer = (
            {"index_heads": config.dsa_indexer_n_heads, "index_dim": config.dsa_indexer_head_dim} if sparse else {}
        )
        return LatentAttention(
            name="self_attention",
            hidden=self.hidden,
            small=self.around()
            + (self.norm(config.kv_lora_rank) + (self.norm(rank) if rank else 0) if normed else 0)
            + self.sinks()
            + 2 * indexer.get("index_dim", 0),  # the indexer's LayerNorm of its keys
            heads=config.num_attention_heads,
            head_dim=config.qk_head_dim,
            rope_dim=config.qk_pos_emb_head_dim,
            value_dim=config.v_head_dim,
            query_rank=rank,
            latent=config.kv_lora_rank,
            bias=bool(self("add_bias_linear", True)),
            window=window,
            index_keys=config.dsa_indexer_topk if sparse else 0,
            **indexer,
        )

    def mlp(self, width: Optional[int] = None) -> MLP:
        return MLP(
            name="mlp",
            hidden=self.hidden,
            small=self.around(),
            width=int(width or self.ffn),
            gated=bool(self("gated_linear_unit", False)),
            bias=bool(self("add_bias_linear", True)),
        )

    def experts(self) -> Experts:
        shared = self("moe_shared_expert_intermediate_size")
        kind = {"gated": bool(self("gated_linear_unit", False)), "bias": bool(self("add_bias_linear", True))}
        # The shared experts' output may have a gate: one number, from a vector as wide as the model.
        gate = self.hidden if shared and self("moe_shared_expert_gate", False) else 0
        return Experts(
            name="mlp",
            hidden=self.hidden,
            small=self.around() + gate,
            count=self.config.num_moe_experts,
            topk=self("moe_router_topk", 2),
            width=self("moe_ffn_hidden_size") or self.ffn,
            latent=self("moe_latent_size") or 0,
            shared=MLP(name="shared_experts", hidden=self.hidden, width=shared, **kind) if shared else None,
            **kind,
        )

    def mixer(self) -> Mixer:
        """A Mamba mixer. Its inner width is ``2 * hidden_size`` unless the number of heads is set."""
        head_dim, states, groups = (
            self.config.mamba_head_dim,
            self.config.mamba_state_dim,
            self.config.mamba_num_groups,
        )
        heads = self("mamba_num_heads") or 2 * self.hidden // head_dim
        channels = heads * head_dim + 2 * groups * states
        # A convolution with bias; decay, time step and skip connection of each head; the gated norm.
        inside = channels * (_CONVOLUTION + 1) + 3 * heads + heads * head_dim
        small = self.norm(self.hidden) + inside
        return Mixer(
            name="mixer", hidden=self.hidden, small=small, heads=heads, head_dim=head_dim, states=states, groups=groups
        )

    def delta_net(self) -> DeltaNet:
        config = self.config
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + heads * width
        # A convolution without bias, decay and time step of each head, a norm of each head's output.
        inside = channels * config.linear_conv_kernel_dim + 2 * heads + self.norm(width)
        return DeltaNet(
            name="self_attention",
            hidden=self.hidden,
            small=self.around() + inside,
            key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            value_heads=heads,
            value_dim=width,
        )

    @property
    def ffn(self) -> int:
        return self("ffn_hidden_size") or 4 * self.hidden

    def window(self, index: int) -> Optional[int]:
        """The tokens that a layer's attention covers, including the current token. None: all previous tokens."""
        size: Any = self("window_size")
        if not size or (not isinstance(size, int) and size[0] < 0):
            return None
        from megatron.core.transformer.utils import is_layer_window_attention

        back = size if isinstance(size, int) else size[0] + 1
        return back if is_layer_window_attention((back, 0), self("window_attn_skip_freq"), index + 1) else None

    def sinks(self) -> int:
        return self.config.num_attention_heads if self("softmax_type", "vanilla") == "learnable" else 0

    def around(self) -> int:
        """The weights of the norms before and after a block, of which a model may have one or both."""
        norms = bool(self("pre_sublayer_layernorm", True)) + bool(self("post_sublayer_layernorm", False))
        return norms * self.norm(self.hidden)

    def shared_norm(self) -> int:
        """The weights of the norm that attention and feed-forward share."""
        return self.norm(self.hidden) if self("parallel_sublayers", False) else 0

    def norm(self, width: int) -> int:
        unbiased = self("normalization", "LayerNorm") == "RMSNorm" or not self("layernorm_bias", True)
        return width if unbiased else 2 * width


def _below(prefix: str, part: Part) -> Part:
    return dataclasses.replace(part, name=f"{prefix}.{part.name}")


def mtp_layer_name() -> str:
    """The module of a prediction depth that holds its layer. Its name differs in newer versions of Megatron-Core."""
    from megatron.core.transformer import multi_token_prediction as mtp

    fields = {field.name for field in dataclasses.fields(mtp.MultiTokenPredictionLayerSubmodules)}
    return "mtp_model_layer" if "mtp_model_layer" in fields else "transformer_layer"
