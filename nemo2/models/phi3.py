# SPDX-License-Identifier: Apache-2.0
"""Phi-3 mini, Llama's decoder at 3.8 B parameters with a window, and the two Phi-4 that have its layers.

Sources: arXiv:2404.14219, section 2; config.json of microsoft/Phi-3-mini-4k-instruct, whose ``sliding_window`` is 2,047.
Microsoft's own code applies it under flash attention only, transformers' class always, as is done here; without the window
the model is the same up to 2,047 tokens, and another one beyond.
"""

from dataclasses import field
from typing import Optional

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel
from nemo2.models.rotary import LongRope, Stretching


class Phi3Config(DecoderConfig, seq_length=4096):
    """Settings that all Phi-3 models share."""


class Phi3ConfigMini(
    Phi3Config,
    num_layers=32,
    hidden_size=3072,
    ffn_hidden_size=8192,
    num_attention_heads=32,
    num_query_groups=32,
    vocab_size=32064,
    # A token and the 2,046 before it; NeMo 2.0 has no window.
    window_size=(2046, 0),
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type="a2a",
):
    """3.82 B parameters with the 32,064-token vocabulary."""


class Phi4Config14B(
    Phi3Config,
    num_layers=40,
    hidden_size=5120,
    ffn_hidden_size=17920,
    num_attention_heads=40,
    num_query_groups=10,
    rotary_base=250_000,
    vocab_size=100352,
    seq_length=16384,
):
    """Phi-4: 14.7 B parameters, no window; arXiv:2412.08905, section 3; config.json of microsoft/phi-4."""


# ``long_factor`` in config.json of microsoft/Phi-4-mini-instruct
_PHI4_MINI = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826,
    3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894,
    8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807,
    22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97,
    33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip


class Phi4MiniConfig3P8B(
    Phi3Config,
    num_layers=32,
    hidden_size=3072,
    ffn_hidden_size=8192,
    num_attention_heads=24,
    num_query_groups=8,
    rotary_percent=0.75,
    vocab_size=200064,
    share_embeddings_and_output_weights=True,
):
    """Phi-4 mini: 3.84 B parameters, the embedding counted once (tied); arXiv:2503.01743, section 2. LongRoPE multiplies queries
    and keys by 1.19 at every length. It divides frequencies beyond 4,096 tokens only."""

    rope_stretching: Optional[Stretching] = field(
        default_factory=lambda: LongRope(
            original_length=4096, factor=32.0, short_factors=[1.0] * 48, long_factors=list(_PHI4_MINI)
        )
    )


class Phi3Model(GPTModel):
    """The LightningModule of Phi-3; see `GPTModel`."""
