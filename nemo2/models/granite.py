# SPDX-License-Identifier: Apache-2.0
"""Granite 3, dense: Llama's decoder with four numbers: the embedding, each block's output, the scores and the logits are
multiplied by one each.

Sources: the model cards and config.json of ibm-granite/granite-3.3-2b-base and granite-3.3-8b-base.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Optional

from megatron.core.transformer import ModuleSpec

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gemma import multiply
from nemo2.models.gpt import GPTModel, default_layer_spec
from nemo2.models.layers.logits import divide_logits
from nemo2.models.layers.post_norm import with_multiplier
from nemo2.models.layers.spec import exchanged, row_parallel_linears


def granite_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers, whose outputs are multiplied before they are added to the residual stream."""
    spec = default_layer_spec(config, vp_stage=vp_stage)
    multiplied = {linear: with_multiplier(linear) for linear in row_parallel_linears()}
    # The router's weights multiply the outputs of routed experts (`GraniteMoEConfig`), whose layers stay Megatron-Core's.
    return exchanged(spec, multiplied, keep=("experts",))


@configurable
@dataclass
class GraniteConfig(DecoderConfig):
    """Settings that all sizes of Granite 3 share."""

    deciding_fields: ClassVar[tuple[str, ...]] = ("embedding_multiplier", "residual_multiplier", "logits_scaling")

    seq_length: int = 131072
    rotary_base: int = 10_000_000
    vocab_size: Optional[int] = 49152
    share_embeddings_and_output_weights: bool = True
    num_query_groups: Optional[int] = 8
    embedding_multiplier: float = 12.0
    """The factor of the embedding's output."""
    residual_multiplier: float = 0.22
    """The factor of the outputs of attention and feed-forward before they are added to the residual stream."""
    logits_scaling: float = 8.0
    """The divisor of the output layer's logits."""
    softmax_scale: Optional[float] = 0.015625
    transformer_layer_spec: Any = granite_layer_spec

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        if model.pre_process:
            model.embedding.register_forward_hook(partial(multiply, self.embedding_multiplier))
        if hasattr(model, "output_layer"):
            divide_logits(model.output_layer, self.logits_scaling)


class Granite3Config2B(GraniteConfig, num_layers=40, hidden_size=2048, num_attention_heads=32, ffn_hidden_size=8192):
    """2.53 B parameters, the embedding counted once (tied)."""


class Granite3Config8B(
    GraniteConfig,
    num_layers=40,
    hidden_size=4096,
    num_attention_heads=32,
    ffn_hidden_size=12800,
    softmax_scale=0.0078125,
    logits_scaling=16.0,
):
    """8.17 B parameters, the embedding counted once (tied)."""


class GraniteModel(GPTModel):
    """The LightningModule of Granite; see `GPTModel`."""
