# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1 and 3.2, Code Llama, Llama-Nemotron Nano and 70B."""

from typing import Any

from nemo2.models.conversion.pieces import cat, one, qkv
from nemo2.models.conversion.positions import KINDS, Rope, positions, positions_of, rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import NEEDED, Config, decoder_fields, read, said, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm, under
from nemo2.models.gpt import GPTConfig
from nemo2.models.llama import Llama31Config, LlamaConfig, LlamaModel

_FIELDS = decoder_fields()
_ONLY = {"model_type": "llama", "hidden_act": "silu"}
SCALING: dict[str, tuple[str, Any]] = {
    "factor": ("scale_factor", NEEDED),
    "low_freq_factor": ("low_freq_factor", NEEDED),
    "high_freq_factor": ("high_freq_factor", NEEDED),
    "original_max_position_embeddings": ("old_context_len", NEEDED),
}


def rows(config: LlamaConfig) -> list[Row]:
    return decoder(config, [*attention(config), *gated_feed_forward(bias=config.add_bias_linear)])


def decoder(config: GPTConfig, layer: list[Row], *, norm_bias: bool = False) -> list[Row]:
    """A whole model with these layers, under names that most families share."""
    return [
        Row("embedding.word_embeddings.weight", one("model.embed_tokens.weight")),
        *under("decoder.layers.*.", "model.layers.*.", layer),
        *norm("decoder.final_layernorm.", one("model.norm."), bias=norm_bias),
        *output_layer(config, "lm_head.weight"),
    ]


def output_layer(config: GPTConfig, name: str) -> list[Row]:
    """The output layer's row. Empty if the output layer is tied to the embedding."""
    return [] if config.share_embeddings_and_output_weights else [Row("output_layer.weight", one(name))]


def attention(config: GPTConfig, *, norm_bias: bool = False) -> list[Row]:
    """A layer's norm and attention, under names that most families share."""
    projections = qkv("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
    return [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm."), bias=norm_bias),
        *linear("self_attention.linear_qkv.", projections, bias=config.add_bias_linear or config.add_qkv_bias),
        *linear("self_attention.linear_proj.", one("self_attn.o_proj."), bias=config.add_bias_linear),
        *(heads_norm() if config.qk_layernorm else []),
    ]


def heads_norm() -> list[Row]:
    """Norms of queries and keys, head by head."""
    return [
        *norm("self_attention.q_layernorm.", one("self_attn.q_norm.")),
        *norm("self_attention.k_layernorm.", one("self_attn.k_norm.")),
    ]


def gated_feed_forward(*, bias: bool = False) -> list[Row]:
    """A layer's second norm and gated feed-forward, under names that most families share."""
    return [
        *norm("mlp.linear_fc1.layer_norm_", one("post_attention_layernorm.")),
        *linear("mlp.linear_fc1.", cat("mlp.gate_proj.", "mlp.up_proj."), bias=bias),
        *linear("mlp.linear_fc2.", one("mlp.down_proj."), bias=bias),
    ]


def config(hf: Config) -> LlamaConfig:
    rope = rope_of(hf, kinds=(*KINDS, "llama3"))
    fields = {**read(hf, _FIELDS, only=_ONLY), **biases(hf)}
    fields |= own_positions(hf, rope, longest=fields["seq_length"])
    return (Llama31Config if rope.kind == "llama3" else LlamaConfig)(**fields)


def hf_config(ours: LlamaConfig) -> dict[str, Any]:
    bias = ours.add_bias_linear
    hf = {**written(ours, _FIELDS, only=_ONLY), "attention_bias": bias, "mlp_bias": bias, **own_positions_of(ours)}
    return said(ours, hf, config)


def biases(hf: Config) -> dict[str, Any]:
    """``add_bias_linear`` for Hugging Face's two fields. In nemo2 all linear layers have biases or none (`unbiased`)."""
    return {"add_bias_linear": bool(hf.get("attention_bias") or hf.get("mlp_bias"))}


def unbiased(hf: Config) -> list[str]:
    """The names of biases that nemo2's layers have and the file lacks, if config.json sets only one of the two fields."""
    parts = {"attention_bias": "self_attn", "mlp_bias": "mlp"}
    return [f"model.layers.*.{part}.*.bias" for field, part in parts.items() if not hf.get(field)]


def own_positions(hf: Config, rope: Rope, *, longest: int) -> dict[str, Any]:
    """nemo2's rotary settings, including those of Llama 3.1's scaling."""
    found = positions(hf, rope, longest=longest)
    return found | scaled(hf, rope, SCALING) if rope.kind == "llama3" else found


def own_positions_of(ours: Any) -> dict[str, Any]:
    """The inverse of `own_positions`."""
    if isinstance(ours, Llama31Config):
        scaling = {theirs: getattr(ours, name) for theirs, (name, _) in SCALING.items()}
        return rope_fields(ours.rotary_base, kind="llama3", **scaling)
    return positions_of(ours)


LLAMA = Conversion(
    architectures=("LlamaForCausalLM",),
    model=LlamaModel,
    configs=(LlamaConfig,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    unbiased=unbiased,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
