# SPDX-License-Identifier: Apache-2.0
"""Command R7B and Command A: Command R's decoder with a window in three of four layers. The fourth attends to everything, and has
no positions.

Sources: transformers' ``Cohere2Config``; config.json of CohereForAI/c4ai-command-r7b-12-2024 and c4ai-command-a-03-2025.
"""

from nemo2.models.cohere import CohereConfig
from nemo2.models.gpt import GPTModel


class Cohere2Config(
    CohereConfig,
    num_query_groups=8,
    rotary_base=50_000,
    logit_scale=0.25,
    window_size=(4095, 0),
    window_attn_skip_freq=4,
    no_rope_freq=4,
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type="a2a",
):
    """Settings that both sizes share. Layers without a window have no positions either."""


class CommandR7BConfig(Cohere2Config, num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336):
    """8.03 B parameters, the embedding counted once (tied)."""


class CommandAConfig111B(
    Cohere2Config, num_layers=64, hidden_size=12288, num_attention_heads=96, ffn_hidden_size=36864
):
    """111.1 B parameters, the embedding counted once (tied)."""


class Cohere2Model(GPTModel):
    """The LightningModule of Command R7B and Command A; see `GPTModel`."""
