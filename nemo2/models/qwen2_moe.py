# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 MoE and Qwen 2 57B-A14B: Qwen 2's attention, routed experts, and a shared one whose output has a gate.

Sources: transformers' ``Qwen2MoeConfig``, whose defaults are config.json of Qwen/Qwen1.5-MoE-A2.7B; arXiv:2407.10671, table 1
(57B-A14B).
"""

from nemo2.models.decoder import GroupedExperts
from nemo2.models.gpt import GPTModel
from nemo2.models.qwen2 import Qwen2Config


class Qwen2MoEConfig(
    GroupedExperts,
    Qwen2Config,
    moe_aux_loss_coeff=1e-3,
    moe_router_pre_softmax=True,
    moe_shared_expert_gate=True,
    num_moe_experts=60,
    moe_router_topk=4,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=5632,
):
    """Settings that both sizes share. The weights of a token's experts aren't divided by their sum."""


class Qwen15MoEConfigA2P7B(
    Qwen2MoEConfig, num_layers=24, hidden_size=2048, num_attention_heads=16, num_query_groups=16, ffn_hidden_size=5632
):
    """14.3 B parameters, 2.7 B of them used per token."""


class Qwen2Config57B_A14B(
    Qwen2MoEConfig,
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_query_groups=4,
    ffn_hidden_size=18944,
    num_moe_experts=64,
    moe_router_topk=8,
    moe_ffn_hidden_size=2560,
    moe_shared_expert_intermediate_size=20480,
):
    """57.4 B parameters, 14 B of them used per token."""


class Qwen2MoEModel(GPTModel):
    """The LightningModule of Qwen 1.5 and 2 with experts; see `GPTModel`."""
