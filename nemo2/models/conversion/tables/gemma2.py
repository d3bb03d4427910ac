# SPDX-License-Identifier: Apache-2.0
"""The conversion of Gemma 2."""

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.settings import Field, alternating_windows, decoder_fields
from nemo2.models.conversion.table import Row, norm
from nemo2.models.conversion.tables.gemma import GEMMA_DEFAULTS, TANH
from nemo2.models.gemma import GemmaConfig
from nemo2.models.gemma2 import Gemma2Config, Gemma2Model


def rows_with_norms_behind(config: GemmaConfig) -> list[Row]:
    gate_and_up = cat("mlp.gate_proj.", "mlp.up_proj.")
    layer = [
        *attention(config),
        *norm("self_attention.linear_proj.post_layernorm.", one("post_attention_layernorm.")),
        *feed_forward(gate_and_up, "mlp.down_proj.", norm_name="pre_feedforward_layernorm."),
        *norm("mlp.linear_fc2.post_layernorm.", one("post_feedforward_layernorm.")),
    ]
    return decoder(config, layer)


GEMMA2 = decoder_conversion(
    "Gemma2ForCausalLM",
    Gemma2Model,
    Gemma2Config,
    rows=rows_with_norms_behind,
    fields=[
        *decoder_fields(num_key_value_heads=4, **GEMMA_DEFAULTS),
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        Field("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        Field("final_logit_softcapping", "final_logit_softcapping", 30.0),
    ],
    only={"model_type": "gemma2", "hidden_activation": TANH, "attention_bias": False},
    translations=[alternating_windows(every=2)],
)
