# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2, V2-Lite and V3, Moonlight and Kimi K2: latent attention, many small experts beside shared ones.

Sources: arXiv:2405.04434, section 3.1.2 and appendix B (V2, V2-Lite); arXiv:2412.19437, section 4.2 (V3); the
released config.json files of deepseek-ai/DeepSeek-V2, V2-Lite and V3-Base.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Optional, Union

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from nemo2.base.backend.extras import have_te
from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTConfig, GPTModel

_LATENT_NORMS = (".q_layernorm", ".kv_layernorm", ".linear_q_up_proj", ".linear_kv_up_proj")
"""Modules that normalize a latent: norms, and projections that Transformer Engine fuses with one."""


@configurable(max_position_embeddings="original_max_position_embeddings")
@dataclass
class DeepSeekConfig(MLATransformerConfig, GPTConfig):
    """Settings that all DeepSeek models share: a latent of 512 channels for keys and values, 64 rotary channels beside it."""

    deciding_fields: ClassVar[tuple[str, ...]] = ("latent_layernorm_epsilon",)

    normalization: str = "RMSNorm"
    activation_func: Callable = F.silu
    gated_linear_unit: bool = True
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    add_bias_linear: bool = False
    share_embeddings_and_output_weights: bool = False
    num_attention_heads: int = 128
    kv_channels: Optional[int] = 128
    seq_length: int = 4096
    rotary_base: float = 10_000  # pyright: ignore[reportIncompatibleVariableOverride]
    original_max_position_embeddings: int = 4096
    make_vocab_size_divisible_by: int = 3200
    mtp_num_layers: Optional[int] = None
    """Additional tokens that are predicted at each position. None: only the next token."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    qk_layernorm: bool = True
    q_lora_rank: Optional[int] = 1536
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rotary_scaling_factor: float = 40
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    moe_grouped_gemm: bool = True
    moe_router_pre_softmax: bool = True
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_router_load_balancing_type: Union[str, list[str]] = "seq_aux_loss"
    moe_shared_expert_overlap: bool = True
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    moe_router_group_score: Literal["sum", "max"] = "sum"
    """The score that ranks groups of experts: ``"sum"``, the sum of the best ``moe_router_topk /
    moe_router_group_topk`` scores of each group (V3, and all that Megatron-Core supports), or ``"max"``, the best
    score alone (V2)."""
    moe_permute_fusion: bool = field(default_factory=have_te)
    init_method_std: float = 0.006
    layernorm_epsilon: float = 1e-6
    latent_layernorm_epsilon: float = 1e-6
    """The epsilon of the norms of latents, which the released models don't take from ``layernorm_epsilon``."""
    attention_softmax_in_fp32: bool = False
    persist_layer_norm: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: Literal["native", "te"] = "te"

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        for name, module in model.named_modules():
            if name.endswith(_LATENT_NORMS) and hasattr(module, "eps"):
                module.eps = self.latent_layernorm_epsilon
        if self.moe_router_group_score == "max":
            rank_groups_by_best_expert(model)


class DeepSeekV2Config(
    DeepSeekConfig,
    num_layers=60,
    hidden_size=5120,
    ffn_hidden_size=12288,
    num_moe_experts=160,
    moe_ffn_hidden_size=1536,
    moe_shared_expert_intermediate_size=3072,
    moe_layer_freq=[0] + [1] * 59,
    moe_router_topk=6,
    moe_router_num_groups=8,
    moe_router_group_topk=3,
    # NeMo 2.0 and Megatron-Core rank the groups by sums, which selects other experts for a quarter and more of the
    # tokens.
    moe_router_group_score="max",
    moe_router_topk_scaling_factor=16.0,
    moe_aux_loss_coeff=1e-3,
    mscale=0.707,
    mscale_all_dim=0.707,
):
    """235.7 B parameters with the 102,400-token vocabulary, 21 B of them used per token."""


class DeepSeekV2LiteConfig(
    DeepSeekV2Config,
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=10944,
    num_attention_heads=16,
    q_lora_rank=None,
    num_moe_experts=64,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
    moe_layer_freq=[0] + [1] * 26,
    moe_router_num_groups=1,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=1.0,
):
    """15.7 B parameters with the 102,400-token vocabulary, 2.4 B of them used per token; queries without a latent."""


class DeepSeekV3Config(
    DeepSeekConfig,
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_moe_experts=256,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_layer_freq=[0] * 3 + [1] * 58,
    moe_router_topk=8,
    moe_router_num_groups=8,
    moe_router_group_topk=4,
    moe_router_topk_scaling_factor=2.5,
    moe_aux_loss_coeff=1e-4,
    make_vocab_size_divisible_by=1280,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
):
    """671.0 B parameters with the 129,280-token vocabulary, 37 B of them used per token."""


class MoonlightConfig16B_A3B(
    DeepSeekV3Config,
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=11264,
    num_attention_heads=16,
    q_lora_rank=None,
    num_moe_experts=64,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
    moe_layer_freq=[0] + [1] * 26,
    moe_router_topk=6,
    moe_router_num_groups=1,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=2.446,
    rope_type="rope",
    rotary_scaling_factor=1.0,
    rotary_base=50_000,
    layernorm_epsilon=1e-5,
    seq_length=8192,
):
    """Moonlight (arXiv:2502.16982): 15.96 B parameters with the 163,840-token vocabulary, 3 B of them used per token; DeepSeek
    V3's layers without groups of experts, latent queries or stretched positions. Source: config.json of
    moonshotai/Moonlight-16B-A3B."""


class KimiK2Config1T_A32B(
    DeepSeekV3Config,
    num_attention_heads=64,
    num_moe_experts=384,
    moe_layer_freq=[0] + [1] * 60,
    moe_router_num_groups=1,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=2.827,
    rotary_base=50_000,
    rotary_scaling_factor=32,
    beta_fast=1,
    beta_slow=1,
):
    """Kimi K2 (arXiv:2507.20534, table 2): 1,026 B parameters with the 163,840-token vocabulary, 32 B of them used per token;
    DeepSeek V3 with half the heads and more experts, without groups. Source: config.json of moonshotai/Kimi-K2-Instruct."""


class DeepSeekModel(GPTModel):
    """The LightningModule of DeepSeek; see `GPTModel`."""

    default_config = DeepSeekV2Config


# (scores [tokens, experts], topk, num_groups, group_topk) -> the picked scores and experts, [tokens, topk] each
Choice = Callable[..., tuple[Tensor, Tensor]]


class BestOfGroup:
    """The choice of experts of a router with groups: only experts of the ``group_topk`` groups with the largest single
    scores.

    ``recorded`` is the router's own replay, which still records and replays these choices. None: it has none.
    """

    def __init__(self, recorded: Optional[Any] = None):
        self.recorded = recorded
        self.layer_number: Optional[int] = None
        """Written by the router, where Megatron-Core numbers its layers."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Optional[int] = None,
        group_topk: Optional[int] = None,
        default_compute_topk: Optional[Choice] = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores ``[tokens, topk]`` and experts ``[tokens, topk]`` that the router picks of ``scores`` ``[tokens, experts]``."""
        assert default_compute_topk is not None, "routers pass their own choice"
        pick = default_compute_topk

        def choose(
            scores: Tensor, topk: int, num_groups: Optional[int] = None, group_topk: Optional[int] = None
        ) -> tuple[Tensor, Tensor]:
            return pick(_of_best_groups(scores, num_groups, group_topk), topk)

        if self.recorded is None:
            return choose(scores, topk, num_groups, group_topk)
        return self.recorded.get_replay_topk(scores, topk, num_groups, group_topk, choose)


def rank_groups_by_best_expert(model: nn.Module) -> None:
    """Makes every router of ``model`` rank its groups of experts by the largest score in each."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            router: Any = module
            router.router_replay = BestOfGroup(router.router_replay)


def _of_best_groups(scores: Tensor, num_groups: Optional[int], group_topk: Optional[int]) -> Tensor:
    """``scores`` ``[tokens, experts]`` with -inf outside of the ``group_topk`` groups with the largest maxima."""
    if not group_topk or not num_groups:
        return scores
    best = scores.unflatten(-1, (num_groups, -1)).amax(dim=-1)
    is_best = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(group_topk, dim=-1).indices, True)
    return scores.masked_fill(~is_best.repeat_interleave(scores.size(-1) // num_groups, dim=-1), float("-inf"))
