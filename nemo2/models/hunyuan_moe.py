# SPDX-License-Identifier: Apache-2.0
"""Hunyuan with experts: Hunyuan's attention; routed experts and a shared one of the same width in every layer.

Sources: transformers' ``HunYuanMoEV1Config``; config.json of tencent/Hunyuan-A13B-Pretrain.
"""

from dataclasses import dataclass, field
from typing import Literal, Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.decoder import GroupedExperts
from nemo2.models.gpt import GPTModel
from nemo2.models.hunyuan import HunyuanConfig
from nemo2.models.rotary import RaisedBase, Stretching


@configurable
@dataclass
class HunyuanMoEConfig(GroupedExperts, HunyuanConfig):
    """Settings that all sizes of Hunyuan with experts share."""

    seq_length: int = 32768
    rope_stretching: Optional[Stretching] = field(
        default_factory=lambda: RaisedBase(original_length=32768, factor=1000.0)
    )
    vocab_size: Optional[int] = 128167
    num_query_groups: Optional[int] = 8
    num_moe_experts: Optional[int] = 64
    moe_router_topk: int = 8
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    moe_aux_loss_coeff: Union[float, list[float]] = 1e-3


class HunyuanConfig80B_A13B(
    HunyuanMoEConfig,
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    ffn_hidden_size=3072,
    moe_shared_expert_intermediate_size=3072,
):
    """80.4 B parameters, 13 B of them used per token; the embedding counted once (tied)."""


class HunyuanMoEModel(GPTModel):
    """The LightningModule of Hunyuan with experts; see `GPTModel`."""
