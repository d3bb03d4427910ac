# SPDX-License-Identifier: Apache-2.0
"""Baichuan 2 7B.

transformers has no class for it. Fields and tensors are those of baichuan-inc/Baichuan2-7B-Base (config.json,
modeling_baichuan.py). The output layer's rows are copied unchanged, because nemo2's model, like the release, divides
them by their length.
"""

from typing import Any

from nemo2.models.baichuan import Baichuan2Config, Baichuan2Model
from nemo2.models.conversion.llama import decoder, gated_feed_forward
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.settings import Config, decoder_fields, read, refusal, said, without, written
from nemo2.models.conversion.table import Conversion, Row, linear, norm

# Every head has its own key and value, hidden_size / num_attention_heads wide.
_FIELDS = without(decoder_fields(), "num_key_value_heads", "head_dim")
_ONLY = {"model_type": "baichuan", "hidden_act": "silu"}


def rows(config: Baichuan2Config) -> list[Row]:
    attention = [
        *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm.")),
        *linear("self_attention.linear_qkv.", fused_qkv("self_attn.W_pack.")),
        *linear("self_attention.linear_proj.", one("self_attn.o_proj.")),
    ]
    return decoder(config, [*attention, *gated_feed_forward()])


def config(hf: Config) -> Baichuan2Config:
    if "max_position_embeddings" not in hf:
        raise refusal(
            hf,
            "model_max_length",
            "a config.json without max_position_embeddings is that of Baichuan 2 13B, whose ALiBi nemo2 doesn't support",
        )
    return Baichuan2Config(**read(hf, _FIELDS, only=_ONLY))


def hf_config(ours: Baichuan2Config) -> dict[str, Any]:
    return said(ours, {**written(ours, _FIELDS, only=_ONLY), "model_max_length": ours.seq_length}, config)


BAICHUAN = Conversion(
    architectures=("BaichuanForCausalLM",),
    model=Baichuan2Model,
    configs=(Baichuan2Config,),
    rows=rows,
    config=config,
    hf_config=hf_config,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
