# SPDX-License-Identifier: Apache-2.0
"""OLMoE: 64 small experts, of which a token uses eight, and norms of queries and keys over all heads.

Sources: arXiv:2409.02060, table 10; transformers' ``OlmoeConfig``, whose defaults are config.json of allenai/OLMoE-1B-7B-0924.
"""

from nemo2.models.decoder import DecoderConfig, GroupedExperts
from nemo2.models.gpt import GPTModel


class OLMoEConfig(
    GroupedExperts,
    DecoderConfig,
    seq_length=4096,
    vocab_size=50304,
    qk_layernorm=True,
    qk_layernorm_over_heads=True,
    num_moe_experts=64,
    moe_router_topk=8,
    moe_router_pre_softmax=True,
    moe_aux_loss_coeff=1e-2,
    moe_z_loss_coeff=1e-3,
):
    """Settings that all sizes of OLMoE share. The weights of a token's experts aren't divided by their sum."""


class OLMoEConfig7B_A1B(OLMoEConfig, num_layers=16, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=1024):
    """6.92 B parameters, 1.3 B of them used per token."""


class OLMoEModel(GPTModel):
    """The LightningModule of OLMoE; see `GPTModel`."""
