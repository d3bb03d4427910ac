# SPDX-License-Identifier: Apache-2.0
"""Ministral 3, the text model: Mistral's decoder with positions stretched by YaRN, in which queries grow with their position.

Sources: transformers' ``Ministral3Config``, whose defaults are the text model's config.json of
mistralai/Ministral-3-8B-Base-2512; the config.json files of Ministral-3-3B-Base-2512 and 14B, as in Megatron-Bridge's
``ministral3_provider.py``. The vision tower is not included.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel
from nemo2.models.layers.queries import sharpen_far_queries
from nemo2.models.rotary import Stretching, Yarn


@configurable
@dataclass
class Ministral3Config(DecoderConfig):
    """Settings that all sizes of Ministral 3 share."""

    deciding_fields: ClassVar[tuple[str, ...]] = ("query_growth",)

    seq_length: int = 262144
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 8
    kv_channels: Optional[int] = 128
    rotary_base: int = 1_000_000
    rope_stretching: Optional[Stretching] = field(
        default_factory=lambda: Yarn(original_length=16384, factor=16.0, attention_factor=1.0)
    )
    vocab_size: Optional[int] = 131072
    query_growth: float = 0.1
    """Multiply the query at position p by 1 + ``query_growth`` ln(1 + floor(p / ``rope_stretching.original_length``))."""

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        if self.rope_stretching is not None:
            for layer in model.decoder.layers:
                sharpen_far_queries(
                    layer.self_attention.core_attention,
                    floor=self.rope_stretching.original_length,
                    factor=self.query_growth,
                )


class Ministral3Config3B(
    Ministral3Config, num_layers=26, hidden_size=3072, ffn_hidden_size=9216, share_embeddings_and_output_weights=True
):
    """3.43 B parameters without the vision tower, the embedding counted once (tied)."""


class Ministral3Config8B(Ministral3Config, num_layers=34, hidden_size=4096, ffn_hidden_size=14336):
    """8.49 B parameters without the vision tower."""


class Ministral3Config14B(
    Ministral3Config, num_layers=40, hidden_size=5120, ffn_hidden_size=16384, rotary_base=1_000_000_000
):
    """13.5 B parameters without the vision tower."""


class Ministral3Model(GPTModel):
    """The LightningModule of Ministral 3; see `GPTModel`."""
