# SPDX-License-Identifier: Apache-2.0
"""The text model of Gemma 3: five layers with a short window for each layer that attends to everything.

Local and global layers rotate positions with different bases. Sources: arXiv:2503.19786, section 2 and table 1; the
released config.json files of google/gemma-3-*-pt. The vision tower is not included.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.gemma import GemmaConfig
from nemo2.models.gpt import GPTModel
from nemo2.models.layers.local_rotary import LocalAndGlobalRotary
from nemo2.models.layers.local_rotary import local_rotary_layer_spec as gemma3_layer_spec
from nemo2.models.rotary import rotary_embedding


@configurable
@dataclass
class Gemma3Config(GemmaConfig):
    """Settings that all sizes of Gemma 3 share."""

    seq_length: int = 131072
    vocab_size: Optional[int] = 262208
    rotary_base: Union[int, tuple[int, int]] = (10_000, 1_000_000)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The rotary bases of the local and of the global layers. A single number applies to both."""
    rope_scaling_factor: float = 1.0
    """The divisor of positions in global layers."""
    qk_layernorm: bool = True
    window_size: Optional[Union[int, tuple[int, int]]] = 512  # pyright: ignore[reportIncompatibleVariableOverride]
    """The number of tokens that a local layer attends to, including the current token. A pair is Megatron-Core's
    form: the tokens before and after the current token."""
    interleaved_attn_pattern: tuple[int, int] = (5, 1)
    """The numbers of local and of global layers in the repeating pattern."""
    post_sublayer_layernorm: bool = True
    """Add a norm after attention and after the feed-forward block, before each is added to the residual stream."""
    is_vision_language: bool = False
    """Whether the released weights also hold a vision tower. The text model is the same in both cases."""
    transformer_layer_spec: Any = gemma3_layer_spec

    def __post_init__(self) -> None:
        if isinstance(self.window_size, int):
            self.window_size = (self.window_size - 1, 0)
        num_local, num_global = self.interleaved_attn_pattern
        pattern = [1] * num_local + [0] * num_global
        self.window_attn_skip_freq = (pattern * math.ceil(self.num_layers / len(pattern)))[: self.num_layers]
        super().__post_init__()

    def _model_arguments(self, tokenizer: Any) -> dict[str, Any]:
        # The model makes its own embedding, for one base.
        return super()._model_arguments(tokenizer) | {"rotary_base": self.rotary_bases[1]}

    @property
    def rotary_bases(self) -> tuple[int, int]:
        """The rotary bases of the local and of the global layers."""
        bases = self.rotary_base
        local, far = bases if isinstance(bases, (tuple, list)) else (bases, bases)
        return int(local), int(far)

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        local, far = self.rotary_bases
        model.rotary_pos_emb = LocalAndGlobalRotary(
            local_layers=rotary_embedding(self, rotary_base=local),
            global_layers=rotary_embedding(
                self, rotary_base=far, seq_len_interpolation_factor=self.rope_scaling_factor
            ),
        )


class Gemma3Config1B(
    Gemma3Config,
    num_layers=26,
    hidden_size=1152,
    num_attention_heads=4,
    num_query_groups=1,
    ffn_hidden_size=6912,
    seq_length=32768,
    vocab_size=262144,
):
    """1.00 B parameters; 32,768 tokens of context."""


class Gemma3Config4B(
    Gemma3Config,
    is_vision_language=True,
    num_layers=34,
    hidden_size=2560,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=10240,
    window_size=1024,
    rope_scaling_factor=8.0,
):
    """3.88 B parameters without the vision tower."""


class Gemma3Config12B(
    Gemma3Config4B, num_layers=48, hidden_size=3840, num_attention_heads=16, num_query_groups=8, ffn_hidden_size=15360
):
    """11.8 B parameters without the vision tower."""


class Gemma3Config27B(
    Gemma3Config4B,
    num_layers=62,
    hidden_size=5376,
    num_attention_heads=32,
    num_query_groups=16,
    kv_channels=128,
    softmax_scale=168**-0.5,
    ffn_hidden_size=21504,
):
    """27.0 B parameters without the vision tower. Scores are scaled by hidden_size / heads, not by the channels per head."""


class Gemma3Model(GPTModel):
    """The LightningModule of Gemma 3; see `GPTModel`."""
