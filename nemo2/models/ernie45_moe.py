# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 with experts, the text model: ERNIE 4.5's attention; experts in all but the first layers, selected by softmax scores
plus a bias, beside shared ones.

Sources: the ERNIE 4.5 technical report, Baidu 2025; transformers' ``Ernie4_5_MoeConfig``, whose defaults are config.json of
baidu/ERNIE-4.5-21B-A3B-PT; config.json of ERNIE-4.5-300B-A47B-PT. The layer of multi-token prediction is not included.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo2.models.decoder import GroupedExperts
from nemo2.models.ernie45 import ERNIE45Config
from nemo2.models.gpt import GPTModel

_LARGEST = -1e-6
"""The largest log p, at which the gradient of log(1 - p) is still finite."""


def score_by_softmax(router: Any) -> None:
    """Make a router of sigmoid scores score by softmax. Its z-loss, which comes first, is that of its own logits."""
    router.apply_z_loss = partial(_as_sigmoid, router.apply_z_loss)


def _as_sigmoid(apply_z_loss: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``logits`` [tokens, experts]."""
    log_p = torch.log_softmax(apply_z_loss(logits, *args, **kwargs).float(), dim=-1).clamp(max=_LARGEST)
    return (log_p - torch.log1p(-log_p.exp())).to(logits.dtype)


class ERNIE45MoEConfig(
    GroupedExperts,
    ERNIE45Config,
    num_moe_experts=64,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
    moe_aux_loss_coeff=1e-3,
):
    """Settings that both sizes of ERNIE 4.5 with experts share. Scores are a softmax (`nemo2.models.ernie45_moe`)."""

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        for layer in model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                score_by_softmax(layer.mlp.router)


class ERNIE45Config21B_A3B(
    ERNIE45MoEConfig,
    num_layers=28,
    hidden_size=2560,
    num_attention_heads=20,
    num_query_groups=4,
    ffn_hidden_size=12288,
    moe_ffn_hidden_size=1536,
    moe_shared_expert_intermediate_size=3072,
    moe_layer_freq=[0] + [1] * 27,
    moe_router_topk=6,
):
    """21.8 B parameters, 3 B of them used per token; the embedding counted once (tied)."""


class ERNIE45Config300B_A47B(
    ERNIE45MoEConfig,
    num_layers=54,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    ffn_hidden_size=28672,
    moe_ffn_hidden_size=3584,
    moe_layer_freq=[0] * 3 + [1] * 51,
    moe_router_topk=8,
    share_embeddings_and_output_weights=False,
):
    """299.5 B parameters, 47 B of them used per token; no shared experts."""


class ERNIE45MoEModel(GPTModel):
    """The LightningModule of ERNIE 4.5 with experts; see `GPTModel`."""
