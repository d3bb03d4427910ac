# SPDX-License-Identifier: Apache-2.0
"""The conversion of OLMo 2."""

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.pieces import one
from nemo2.models.conversion.settings import DERIVED, decoder_fields
from nemo2.models.conversion.table import Row, norm
from nemo2.models.olmo2 import OLMo2Config, OLMo2Model


def rows(config: OLMo2Config) -> list[Row]:
    layer = [
        *(row for row in (*attention(config), *gated_feed_forward()) if "layer_norm_" not in row.key),
        *norm("self_attention.linear_proj.post_layernorm.", one("post_attention_layernorm.")),
        *norm("mlp.linear_fc2.post_layernorm.", one("post_feedforward_layernorm.")),
    ]
    return decoder(config, layer)


OLMO2 = decoder_conversion(
    "Olmo2ForCausalLM",
    OLMo2Model,
    OLMo2Config,
    rows=rows,
    fields=decoder_fields(head_dim=DERIVED, rms_norm_eps=1e-5),
    only={"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False},
)
