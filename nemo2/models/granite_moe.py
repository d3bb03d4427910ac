# SPDX-License-Identifier: Apache-2.0
"""Granite 3 with experts: Granite's decoder and its four numbers; small experts in every layer, and in some models a shared one.

Sources: transformers' ``GraniteMoeConfig`` and ``GraniteMoeSharedConfig``; the model cards and config.json of
ibm-granite/granite-3.0-1b-a400m-base and granite-3.0-3b-a800m-base.
"""

from nemo2.base.errors import ConfigError
from nemo2.models.decoder import GroupedExperts
from nemo2.models.gpt import GPTModel
from nemo2.models.granite import GraniteConfig


class GraniteMoEConfig(
    GroupedExperts,
    GraniteConfig,
    seq_length=4096,
    rotary_base=10_000,
    layernorm_epsilon=1e-6,
    logits_scaling=6.0,
    ffn_hidden_size=512,
    num_moe_experts=32,
    moe_router_topk=8,
    moe_aux_loss_coeff=1e-3,
):
    """Settings that all sizes of Granite 3 with experts share."""

    def __post_init__(self) -> None:
        if self.moe_router_topk_scaling_factor not in (None, self.residual_multiplier):
            raise ConfigError(
                f"model.config.moe_router_topk_scaling_factor={self.moe_router_topk_scaling_factor} is residual_multiplier="
                f"{self.residual_multiplier} in this model, because it multiplies the experts' outputs: leave it unset, and set "
                "residual_multiplier."
            )
        self.moe_router_topk_scaling_factor = self.residual_multiplier
        super().__post_init__()


class Granite3Config1B_A400M(GraniteMoEConfig, num_layers=24, hidden_size=1024, num_attention_heads=16):
    """1.33 B parameters, 0.4 B of them used per token; the embedding counted once (tied)."""


class Granite3Config3B_A800M(
    GraniteMoEConfig, num_layers=32, hidden_size=1536, num_attention_heads=24, num_moe_experts=40
):
    """3.30 B parameters, 0.8 B of them used per token; the embedding counted once (tied)."""


class GraniteMoESharedConfig(GraniteMoEConfig):
    """Granite with experts, and with a shared expert of ``moe_shared_expert_intermediate_size`` in every layer."""


class GraniteMoEModel(GPTModel):
    """The LightningModule of Granite with experts; see `GPTModel`."""
