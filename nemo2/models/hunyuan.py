# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense: Llama's decoder, whose attention normalizes queries and keys after their rotation, with a rotary base that
is raised once, whatever the sequence's length.

Sources: transformers' ``HunYuanDenseV1Config``; config.json of tencent/Hunyuan-0.5B-Pretrain, 1.8B, 4B and 7B.
"""

from dataclasses import field
from typing import Any, Optional

from megatron.core.transformer import ModuleSpec

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel
from nemo2.models.layers.norm import NormAfterRotation, normalize_after_rotation
from nemo2.models.layers.spec import changed_layer_spec
from nemo2.models.rotary import RaisedBase


def hunyuan_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers, with norms of queries and keys that are applied after the rotation."""

    def normalize_later(parts: Any, number: int) -> None:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = NormAfterRotation

    return changed_layer_spec(config, normalize_later, vp_stage=vp_stage)


class HunyuanConfig(
    DecoderConfig,
    seq_length=262144,
    kv_channels=128,
    qk_layernorm=True,
    rope_stretching=field(default_factory=lambda: RaisedBase(original_length=262144, factor=1000.0)),
    vocab_size=120818,
    share_embeddings_and_output_weights=True,
    transformer_layer_spec=hunyuan_layer_spec,
):
    """Settings that all dense sizes of Hunyuan share."""

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        for layer in model.decoder.layers:
            normalize_after_rotation(layer.self_attention)


class HunyuanConfig500M(
    HunyuanConfig, num_layers=24, hidden_size=1024, num_attention_heads=16, num_query_groups=8, ffn_hidden_size=3584
):
    """0.54 B parameters, the embedding counted once (tied)."""


class HunyuanConfig1P8B(
    HunyuanConfig, num_layers=32, hidden_size=2048, num_attention_heads=16, num_query_groups=4, ffn_hidden_size=6144
):
    """1.79 B parameters, the embedding counted once (tied)."""


class HunyuanConfig4B(
    HunyuanConfig, num_layers=36, hidden_size=3072, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=8192
):
    """4.22 B parameters, the embedding counted once (tied)."""


class HunyuanConfig7B(
    HunyuanConfig,
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=128167,
):
    """7.50 B parameters, the embedding counted once (tied)."""


class HunyuanModel(GPTModel):
    """The LightningModule of Hunyuan; see `GPTModel`."""
