# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B and 120B: experts in every layer, attention sinks, every other layer with a window of 128 tokens.

Source: the model card arXiv:2508.10925, section 2; config.json of openai/gpt-oss-20b and gpt-oss-120b.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Optional, Union

from megatron.core.fusions.fused_bias_geglu import quick_gelu

from nemo2.config.capture import configurable
from nemo2.models.decoder import GroupedExperts
from nemo2.models.gpt import GPTConfig, GPTModel


@configurable(rotary_scaling_factor="yarn_rotary_scaling_factor")
@dataclass
class GPTOSSConfig(GroupedExperts, GPTConfig):
    """Settings that both sizes share, hidden size, heads and expert width included."""

    hidden_size: int = 2880
    num_attention_heads: int = 64
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 2880
    kv_channels: Optional[int] = 64
    normalization: str = "RMSNorm"
    gated_linear_unit: bool = True
    share_embeddings_and_output_weights: bool = False
    vocab_size: Optional[int] = 201088
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "yarn"  # pyright: ignore[reportIncompatibleVariableOverride]
    rotary_base: int = 150_000
    yarn_rotary_scaling_factor: float = 32.0
    """Factor by which YaRN stretches the original context (arXiv:2309.00071)."""
    # NeMo 2.0 has 131072, the stretched length, which puts YaRN's correction range at the wrong frequencies.
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: Optional[float] = None
    yarn_mscale_all_dim: Optional[float] = None
    yarn_correction_range_round_to_int: bool = False
    moe_router_topk: int = 4
    moe_ffn_hidden_size: Optional[int] = 2880
    moe_router_load_balancing_type: Union[str, list[str]] = "none"
    seq_length: int = 131072
    # A token and the 127 before it. NeMo 2.0's (128, 0) is one more than the released models were trained with.
    window_size: Optional[tuple[int, int]] = (127, 0)
    window_attn_skip_freq: Optional[Union[int, list[int]]] = 2
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "learnable"
    activation_func: Callable = quick_gelu
    glu_linear_offset: float = 1.0
    activation_func_clamp_value: Optional[float] = 7.0
    bias_activation_fusion: bool = True


class GPTOSSConfig20B(GPTOSSConfig, num_layers=24, num_moe_experts=32):
    """20.9 B parameters, 3.6 B of them used per token."""


class GPTOSSConfig120B(GPTOSSConfig, num_layers=36, num_moe_experts=128):
    """116.8 B parameters, 5.1 B of them used per token."""


class GPTOSSModel(GPTModel):
    """The LightningModule of GPT-OSS; see `GPTModel`."""
