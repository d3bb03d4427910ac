# SPDX-License-Identifier: Apache-2.0
"""The text models of Llama 4 Scout (16 experts) and Maverick (128 experts).

Every fourth layer has no positions. The other layers rotate them and attend only within their chunk of 8,192 tokens.
Each token uses one routed expert, and all tokens use a shared expert. Sources: config.json and modeling code of
meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E in Hugging Face transformers. The vision tower is not
included.
"""

from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.experts import dense_or_experts, shared_experts
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.positions import own_scaling
from nemo2.models.conversion.settings import (
    Config,
    Field,
    Translation,
    decoder_fields,
    meaning,
    refusal,
    text_config,
    without,
)
from nemo2.models.conversion.table import IN_VISION_MODEL, Row, norm
from nemo2.models.layers.chunked_attention import attend_in_chunks
from nemo2.models.layers.queries import sharpen_far_queries
from nemo2.models.layers.spec import changed_layer_spec
from nemo2.models.llama import SCALING, Llama3Config, LlamaModel
from nemo2.models.rotary import scale_positions


def llama4_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers. Layers without positions also have no norm of queries and keys."""

    def leave_out_norms(parts: Any, number: int) -> None:
        if config.no_rope_freq and config.no_rope_freq[number - 1]:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = IdentityOp

    return changed_layer_spec(config, leave_out_norms, vp_stage=vp_stage)


@configurable(nope_layer_interval="no_rope_freq")
@dataclass
class Llama4Config(Llama3Config):
    """Settings that Scout and Maverick share."""

    num_layers: int = 48
    hidden_size: int = 5120
    ffn_hidden_size: Optional[int] = 16384
    num_attention_heads: int = 40
    vocab_size: Optional[int] = 202048
    rotary_interleaved: bool = True
    apply_rope_fusion: bool = False
    no_rope_freq: Optional[Union[int, list[int]]] = 4
    """Every n-th layer has no positions. A list has an entry per layer: 1 for a layer without positions."""
    rope_scaling: bool = True
    """Whether rotary frequencies are scaled by ``rope_scaling_factor``, as in Llama 3.1."""
    # NeMo 2.0 has Llama 3.1's (8, 1, 4).
    rope_scaling_factor: float = 16.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """If it equals ``low_freq_factor``, each frequency is either kept or divided, without a transition."""
    old_context_len: int = 8192
    attention_chunk_size: Optional[int] = 8192
    """The size of the chunk, in tokens, within which layers with positions attend. None: they attend to all previous
    tokens."""
    attn_temperature_tuning: bool = True
    """Multiply the query at position p by 1 + ``attn_scale`` ln(1 + floor((p + 1) / ``floor_scale``)) in layers
    without positions. The factor is 1 up to that position (arXiv:2501.19399). NeMo 2.0 leaves it out."""
    floor_scale: int = 8192
    attn_scale: float = 0.1
    qk_l2_norm: bool = True
    """Divide queries and keys by their root mean square, without weights."""
    moe_grouped_gemm: bool = True
    moe_shared_expert_intermediate_size: Optional[int] = 8192
    moe_ffn_hidden_size: Optional[int] = 8192
    moe_router_topk: int = 1
    moe_router_score_function: Literal["softmax", "sigmoid"] = "sigmoid"
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = None
    moe_apply_probs_on_input: bool = True
    moe_shared_expert_overlap: bool = True
    transformer_layer_spec: Any = llama4_layer_spec

    def customize_model(self, model: Any) -> None:
        """Scale rotary frequencies, and let layers attend in chunks or sharpen far queries.

        Raises:
            ConfigError: sequences longer than a chunk are split over context-parallel ranks.
        """
        chunk, cp = self.attention_chunk_size, self.context_parallel_size
        if chunk is not None and cp > 1 and self.seq_length > chunk:
            raise ConfigError(
                f"model.config.attention_chunk_size={chunk} needs whole sequences if seq_length={self.seq_length} is longer than "
                f"a chunk, but context_parallel_size={cp} shards sequences. Set context_parallel_size=1, or "
                "attention_chunk_size=None for full attention."
            )
        super().customize_model(model)
        if self.rope_scaling:
            scale_positions(model, self, scale_factor=self.rope_scaling_factor)
        skips: Any = self.no_rope_freq or [0] * self.num_layers
        for layer in model.decoder.layers:
            core_attention = layer.self_attention.core_attention
            if skips[layer.layer_number - 1]:
                if self.attn_temperature_tuning:
                    sharpen_far_queries(core_attention, floor=self.floor_scale, factor=self.attn_scale, first=1)
            elif chunk is not None and cp == 1:
                attend_in_chunks(core_attention, chunk)


class Llama4Experts16Config(Llama4Config, num_moe_experts=16):
    """Scout: 107.8 B parameters without the vision tower, 17 B of them used per token; experts in every layer."""


class Llama4Experts128Config(
    Llama4Config, num_moe_experts=128, rope_scaling=False, moe_layer_freq=[0, 1] * 24, qk_l2_norm=False
):
    """Maverick: 400.7 B parameters without the vision tower, 17 B of them used per token; experts in every other layer."""


_FIELDS = [
    *without(
        decoder_fields(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        "intermediate_size",
        "max_position_embeddings",
    ),
    Field("intermediate_size", "moe_ffn_hidden_size", 8192),
    Field("intermediate_size_mlp", "ffn_hidden_size", 16384),
    Field("num_local_experts", "num_moe_experts", 16),
    Field("use_qk_norm", "qk_l2_norm", True),
    Field("floor_scale", "floor_scale", 8192),
    Field("attn_scale", "attn_scale", 0.1),
    Field("attention_chunk_size", "attention_chunk_size", 8192),
]
_ONLY = {"model_type": "llama4_text", "hidden_act": "silu", "attention_bias": False, "num_experts_per_tok": 1}
_SCALING = {theirs: (ours.replace("scale_factor", "rope_scaling_factor"), d) for theirs, (ours, d) in SCALING.items()}


def _rows(config: Llama4Config) -> list[Row]:
    gate_and_up = cat("feed_forward.gate_proj.", "feed_forward.up_proj.")
    dense = feed_forward(gate_and_up, "feed_forward.down_proj.")
    return decoder(config, [*attention(config), *dense_or_experts(config, dense=dense, experts=_experts())])


def _experts() -> list[Row]:
    """Experts are stacked and stored [in, out]."""
    stacked = "feed_forward.experts."
    return [
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("feed_forward.router.weight")),
        Row("mlp.experts.experts.linear_fc1.weight", one(f"{stacked}gate_up_proj", stacked=True, transposed=True)),
        Row("mlp.experts.experts.linear_fc2.weight", one(f"{stacked}down_proj", stacked=True, transposed=True)),
        *shared_experts("feed_forward.shared_expert."),
    ]


def _ours(text: Config) -> dict[str, Any]:
    layers = text["num_hidden_layers"]
    rotated = text.get("no_rope_layers") or [
        int((n + 1) % text.get("no_rope_layer_interval", 4) != 0) for n in range(layers)
    ]
    types = text.get("layer_types")
    if types and types != ["chunked_attention" if flag else "full_attention" for flag in rotated]:
        raise refusal(
            text, "layer_types", "nemo2's layers attend in chunks exactly if they rotate positions (no_rope_layers)"
        )
    step = text.get("interleave_moe_layer_step", 1)
    experts_in = text.get("moe_layers")
    experts_in = list(range(step - 1, layers, step)) if experts_in is None else experts_in
    return {
        "moe_layer_freq": [int(n in experts_in) for n in range(layers)] if len(experts_in) < layers else 1,
        "moe_shared_expert_intermediate_size": text.get("intermediate_size", 8192),
        "no_rope_freq": [int(not flag) for flag in rotated],
        # max_position_embeddings is a limit for inference, not the length of training sequences.
        "seq_length": min(text.get("max_position_embeddings", 131072), 8192),
        "attn_temperature_tuning": bool(text.get("attn_temperature_tuning", True)),
    }


def _theirs(ours: Llama4Config) -> dict[str, Any]:
    settings = meaning(ours)
    rotated = [int(not flag) for flag in settings["without_positions"] or [0] * ours.num_layers]
    return {
        "max_position_embeddings": ours.seq_length,
        "attn_temperature_tuning": ours.attn_temperature_tuning,
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if flag else "full_attention" for flag in rotated],
        "moe_layers": [layer for layer, experts in enumerate(settings["experts_in"] or []) if experts],
    }


LLAMA4 = decoder_conversion(
    "Llama4ForCausalLM",
    LlamaModel,
    Llama4Config,
    rows=_rows,
    fields=_FIELDS,
    only=_ONLY,
    translations=[Translation(_ours, _theirs)],
    rotary=own_scaling("llama3", _SCALING, on={"rope_scaling": True}, off={"rope_scaling": False}, theta=500_000.0),
    flat=text_config,
    also=("Llama4ForConditionalGeneration",),
    **IN_VISION_MODEL,
)
