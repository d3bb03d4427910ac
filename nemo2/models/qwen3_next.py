# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and the text models of Qwen 3.5: three layers of linear attention (gated DeltaNet), then one of full attention
whose output has a gate; norms centred on zero; experts with a gated shared one, or dense layers.

Sources: transformers' ``Qwen3NextConfig``, ``Qwen3_5TextConfig`` and ``Qwen3_5MoeTextConfig``, whose defaults are the shapes in
config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, Qwen/Qwen3.5-9B and Qwen/Qwen3.5-35B-A3B. The releases' weights of multi-token
prediction and their vision towers are not included.
"""

from typing import ClassVar

from nemo2.models.decoder import GroupedExperts
from nemo2.models.gpt import GPTModel
from nemo2.models.qwen2 import Qwen2Config
from nemo2.models.walker import linear_attention_layers


class Qwen35Config(
    Qwen2Config,
    seq_length=262144,
    rotary_base=10_000_000,
    rotary_percent=0.25,
    add_qkv_bias=False,
    qk_layernorm=True,
    layernorm_zero_centered_gamma=True,
    vocab_size=248320,
    num_attention_heads=16,
    num_query_groups=4,
    kv_channels=256,
    attention_output_gate=True,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
):
    """Settings that the dense sizes of Qwen 3.5 share."""

    deciding_fields: ClassVar[tuple[str, ...]] = (
        "layers_with_linear_attention", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads",
    )  # fmt: skip

    @property
    def layers_with_linear_attention(self) -> list[bool]:
        return linear_attention_layers(self)


class Qwen35MoEConfig(
    GroupedExperts,
    Qwen35Config,
    num_query_groups=2,
    num_moe_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
    moe_aux_loss_coeff=1e-3,
):
    """Settings that the sizes of Qwen 3.5 with experts share."""


class Qwen3NextConfig(Qwen35MoEConfig, vocab_size=151936, num_moe_experts=512, moe_router_topk=10):
    """Settings that all sizes of Qwen3-Next share."""


class Qwen3NextConfig80B_A3B(Qwen3NextConfig, num_layers=48, hidden_size=2048, ffn_hidden_size=5120):
    """79.7 B parameters, 3.9 B of them used per token."""


class Qwen35Config9B(Qwen35Config, num_layers=32, hidden_size=4096, ffn_hidden_size=12288):
    """9.0 B parameters without the vision tower."""


class Qwen35Config35B_A3B(Qwen35MoEConfig, num_layers=40, hidden_size=2048):
    """34.7 B parameters without the vision tower, 3.5 B of them used per token."""


class Qwen3NextModel(GPTModel):
    """The LightningModule of Qwen3-Next and Qwen 3.5; see `GPTModel`."""
