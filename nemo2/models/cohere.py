# SPDX-License-Identifier: Apache-2.0
"""Cohere's Command R and Aya: attention and feed-forward in parallel behind one LayerNorm without a bias, channels rotated in
pairs, and scaled logits.

Sources: transformers' ``CohereConfig``, whose defaults are config.json of CohereForAI/c4ai-command-r-v01; config.json of
CohereForAI/c4ai-command-r-08-2024 and aya-expanse-8b. Command R+ has norms of each head's queries and keys, which nemo2 lacks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel
from nemo2.models.layers.logits import divide_logits
from nemo2.models.layers.shared_norm import check_shared_norms, parallel_layer_spec, share_norms


@configurable
@dataclass
class CohereConfig(DecoderConfig):
    """Settings that all sizes of Command R and Aya share."""

    deciding_fields: ClassVar[tuple[str, ...]] = ("logit_scale",)
    parallel_sublayers: ClassVar[bool] = True
    """Attention and feed-forward share one norm."""
    layernorm_bias: ClassVar[bool] = False

    seq_length: int = 131072
    normalization: str = "LayerNorm"
    pre_sublayer_layernorm: bool = False
    rotary_interleaved: bool = True
    vocab_size: Optional[int] = 256000
    share_embeddings_and_output_weights: bool = True
    logit_scale: float = 0.0625
    """The factor of the output layer's logits."""
    transformer_layer_spec: Any = parallel_layer_spec

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shared_norms(self)

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        share_norms(model)
        if hasattr(model, "output_layer"):
            divide_logits(model.output_layer, 1 / self.logit_scale)


class CommandRConfig35B(
    CohereConfig, num_layers=40, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=22528, rotary_base=8_000_000
):
    """35.0 B parameters, the embedding counted once (tied); multi-head attention."""


class CommandRConfig32B(
    CohereConfig,
    num_layers=40,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    ffn_hidden_size=24576,
    rotary_base=4_000_000,
):
    """32.3 B parameters, the embedding counted once (tied)."""


class AyaConfig8B(
    CohereConfig,
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    seq_length=8192,
    logit_scale=0.125,
):
    """8.03 B parameters, the embedding counted once (tied)."""


class CohereModel(GPTModel):
    """The LightningModule of Command R and Aya; see `GPTModel`."""
