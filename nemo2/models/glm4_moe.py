# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and 4.6: grouped-query attention of which half of each head's channels is rotated, and DeepSeek V3's experts.

Sources: arXiv:2508.06471, table 1; transformers' ``Glm4MoeConfig`` (zai-org/GLM-4.5); the config.json files of zai-org/GLM-4.5,
GLM-4.5-Air and GLM-4.6.
"""

from nemo2.models.decoder import DecoderConfig, GroupedExperts
from nemo2.models.gpt import GPTModel


class GLM4MoEConfig(
    GroupedExperts,
    DecoderConfig,
    seq_length=131072,
    rotary_base=1_000_000,
    rotary_percent=0.5,
    vocab_size=151552,
    add_qkv_bias=True,
    num_attention_heads=96,
    num_query_groups=8,
    kv_channels=128,
    num_moe_experts=128,
    moe_router_topk=8,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=1e-4,
):
    """Settings that all sizes share: 96 heads of 128 channels for both widths, a dense layer or three before the experts."""


class GLM45AirConfig106B_A12B(
    GLM4MoEConfig,
    num_layers=46,
    hidden_size=4096,
    ffn_hidden_size=10944,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=1408,
    moe_layer_freq=[0] + [1] * 45,
    moe_router_topk_scaling_factor=1.0,
):
    """GLM-4.5-Air: 106.9 B parameters, 12 B of them used per token."""


class GLM45Config355B_A32B(
    GLM4MoEConfig,
    num_layers=92,
    hidden_size=5120,
    ffn_hidden_size=12288,
    num_moe_experts=160,
    moe_ffn_hidden_size=1536,
    moe_shared_expert_intermediate_size=1536,
    moe_layer_freq=[0] * 3 + [1] * 89,
    moe_router_topk_scaling_factor=2.5,
    qk_layernorm=True,
):
    """GLM-4.5: 352.8 B parameters, 32 B of them used per token; a norm on each query and key."""


class GLM46Config355B_A32B(GLM45Config355B_A32B, seq_length=202752):
    """GLM-4.6: GLM-4.5's shape; 202,752 tokens of context."""


class GLM4MoEModel(GPTModel):
    """The LightningModule of GLM-4.5 and 4.6; see `GPTModel`."""
