# SPDX-License-Identifier: Apache-2.0
"""The conversion of Baichuan 2 7B."""

from typing import Any

from nemo2.models.baichuan import Baichuan2Config, Baichuan2Model
from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, gated_feed_forward
from nemo2.models.conversion.pieces import fused_qkv
from nemo2.models.conversion.positions import UNROTATED
from nemo2.models.conversion.settings import Config, Translation, decoder_fields, refusal, without

# Every head has its own key and value, hidden_size / num_attention_heads wide.


def _refuse_alibi(hf: Config) -> dict[str, Any]:
    if "max_position_embeddings" not in hf:
        raise refusal(
            hf,
            "model_max_length",
            "a config.json without max_position_embeddings is that of Baichuan 2 13B, whose ALiBi nemo2 doesn't support",
        )
    return {}


BAICHUAN = decoder_conversion(
    "BaichuanForCausalLM",
    Baichuan2Model,
    Baichuan2Config,
    rows=lambda config: decoder(config, [*attention(config, fused_qkv("self_attn.W_pack.")), *gated_feed_forward()]),
    # Every head has its own key and value, hidden_size / num_attention_heads wide.
    fields=without(decoder_fields(), "num_key_value_heads", "head_dim"),
    only={"model_type": "baichuan", "hidden_act": "silu"},
    translations=[Translation(_refuse_alibi, lambda own: {"model_max_length": own.seq_length})],
    rotary=UNROTATED,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
