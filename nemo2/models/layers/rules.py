# SPDX-License-Identifier: Apache-2.0
"""Configurations that the plain PyTorch layers reject: one sentence for each broken rule.

`layer_problems(config)` checks a recipe before anything is built. The layers call the parts that concern them, so that
no setting is silently ignored. A missing field counts as its default, because the installed Megatron-Core may be older
or newer than the field.
"""

from collections.abc import Iterable
from typing import Any, Optional

from nemo2.base.backend.extras import why_missing
from nemo2.base.errors import ConfigError

CP_COMM_TYPES = ("all_gather", "p2p", "a2a")


def layer_problems(config: Any) -> list[str]:
    """The settings of `config` (a TransformerConfig) that layers without Transformer Engine don't support. Empty: none."""
    types = getattr(config, "cp_comm_type", None)
    problems = []
    for kind in dict.fromkeys(types if isinstance(types, list) else [types]):
        problems += attention_problems(config, cp_comm_type=kind)
    problems += mla_problems(config) + moe_problems(config)
    if getattr(config, "experimental_attention_variant", None) not in (None, "gated_delta_net"):
        problems.append(
            f"experimental_attention_variant={config.experimental_attention_variant!r}: its kernels require a GPU "
            f"with Transformer Engine ({why_missing('transformer_engine')}). Set experimental_attention_variant=None."
        )
    return list(dict.fromkeys(problems))


def attention_problems(config: Any, *, cp_comm_type: Optional[str] = None) -> list[str]:
    """The settings that `SDPAttention` doesn't support. `cp_comm_type` is the layer's. None: the default."""
    problems = []
    if getattr(config, "qk_clip", False):
        problems.append(
            "qk_clip=True: QK clipping uses the largest scores of Transformer Engine's attention, which this machine "
            "does not use. Set qk_clip=False, or train on a GPU with Transformer Engine."
        )
    cp = config.context_parallel_size
    if cp == 1 or cp_comm_type is None:
        return problems
    if cp_comm_type not in CP_COMM_TYPES:
        problems.append(
            f"cp_comm_type={cp_comm_type!r}: without Transformer Engine, must be one of "
            f"{', '.join(map(repr, CP_COMM_TYPES))}."
        )
    elif cp_comm_type == "a2a":
        problems += heads_over_context_ranks(config)
    return problems


def heads_over_context_ranks(config: Any) -> list[str]:
    """The requirement of ``cp_comm_type="a2a"``, which shards the heads of queries, keys and values over the
    context-parallel ranks. It holds for Transformer Engine's attention too."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    groups = config.num_attention_heads if config.multi_latent_attention else config.num_query_groups
    for name, heads in (("num_attention_heads", config.num_attention_heads), ("num_query_groups", groups)):
        if heads % (tp * cp):
            return [
                f"cp_comm_type='a2a' splits attention heads over ranks, but {name} = {heads} is not a multiple of "
                f"tensor_model_parallel_size * context_parallel_size = {tp} * {cp} = {tp * cp}. Set cp_comm_type to "
                "'p2p' or 'all_gather'."
            ]
    return []


def mla_problems(config: Any) -> list[str]:
    """Requirements of multi-latent attention. The first rule holds with Transformer Engine too."""
    if not config.multi_latent_attention:
        return []
    problems = mla_over_tensor_ranks(config)
    if getattr(config, "mla_down_proj_fusion", False):
        problems.append("mla_down_proj_fusion=True requires Transformer Engine. Set mla_down_proj_fusion=False.")
    if getattr(config, "cache_mla_latents", False):
        problems.append("cache_mla_latents=True is for inference with Transformer Engine. Set cache_mla_latents=False.")
    return problems


def mla_over_tensor_ranks(config: Any) -> list[str]:
    """The requirements of latent attention with any kind of layer. Megatron-Core 0.16 and 0.19 sum the gradient of every
    weight called q_layernorm over the tensor-parallel ranks. That is right for norms of single heads, but multiplies the
    gradient of a shared latent's norm by the tensor-parallel size. A rank gets the query heads of whole groups where there are
    fewer groups than ranks, and only other attention takes its own heads out of them."""
    tp, groups = config.tensor_model_parallel_size, config.num_query_groups
    if not config.multi_latent_attention or tp == 1:
        return []
    problems = []
    if not config.sequence_parallel:
        problems.append(
            f"multi_latent_attention=True with tensor_model_parallel_size={tp} requires sequence_parallel=True. Without "
            "it, the gradient of the query norm is summed once per tensor-parallel rank. Set sequence_parallel=True."
        )
    if groups < tp:
        problems.append(
            f"multi_latent_attention=True has no groups of heads to share between tensor_model_parallel_size={tp} ranks, and "
            f"Megatron-Core would give each the heads of num_query_groups={groups}. Leave num_query_groups unset."
        )
    return problems


def delta_net_problems(config: Any, *, tp: int, cp: int) -> list[str]:
    """Requirements of gated DeltaNet with any kind of layer, in a layout of these tensor- and context-parallel sizes."""
    if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
        return []
    problems = []
    if cp > 1:
        problems.append(
            f"context_parallel_size={cp}: gated DeltaNet layers need whole sequences. Set context_parallel_size=1."
        )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if (heads := getattr(config, name, None) or 0) % tp:
            problems.append(
                f"{name}={heads} is not a multiple of tensor_model_parallel_size={tp}, and each rank has whole heads. Set "
                "tensor_model_parallel_size to a divisor."
            )
    if getattr(config, "mtp_num_layers", None):
        problems.append(
            f"mtp_num_layers={config.mtp_num_layers}: models with gated DeltaNet layers have no multi-token prediction "
            "here. Set mtp_num_layers=None."
        )
    if getattr(config, "multi_latent_attention", False):
        problems.append(
            "multi_latent_attention=True: gated DeltaNet layers take the projections of ordinary attention. Set "
            "multi_latent_attention=False, or experimental_attention_variant=None."
        )
    return problems


def moe_problems(config: Any) -> list[str]:
    """Requirements of expert layers."""
    if not config.num_moe_experts:
        return []
    problems = [
        *experts_cut_only_where_shared(config),
        *experts_need_sequence_parallel(config),
        *experts_have_no_post_norm(config),
    ]
    if config.moe_token_dispatcher_type == "flex":
        problems.append(
            "moe_token_dispatcher_type='flex' requires the GPU kernels of DeepEP or HybridEP. Set "
            "moe_token_dispatcher_type='alltoall'."
        )
    if getattr(config, "moe_latent_size", None) is not None:
        problems.append(
            f"moe_latent_size={config.moe_latent_size}: Megatron-Core builds latent projections from layers of "
            f"Transformer Engine ({why_missing('transformer_engine')}). Set moe_latent_size=None."
        )
    return problems


def experts_cut_only_where_shared(config: Any) -> list[str]:
    """The requirement of sharded experts with any kind of layer. Megatron-Core reduces the gradients of experts over the
    experts' replicas only with expert parallelism. Otherwise it reduces them over the replicas of the dense layers, which
    hold shards of other experts or not all replicas."""
    tp, etp = config.tensor_model_parallel_size, getattr(config, "expert_tensor_parallel_size", None)
    if not config.num_moe_experts or config.expert_model_parallel_size > 1 or etp in (None, tp):
        return []
    return [
        f"expert_tensor_parallel_size={etp} with tensor_model_parallel_size={tp} requires expert_model_parallel_size "
        "> 1. With 1, Megatron-Core sums the gradients of the experts over the wrong ranks. Leave "
        f"expert_tensor_parallel_size unset (it then equals {tp}), or set expert_model_parallel_size to 2 or more."
    ]


def best_of_group_needs_plain_router(config: Any) -> list[str]:
    """The requirement of ``moe_router_group_score="max"`` with any kind of layer. Transformer Engine's fused router ranks
    groups by the sum of their best scores. That is the best score alone only if a token gets one expert per group."""
    topk, groups = config.moe_router_topk, config.moe_router_group_topk
    if (
        getattr(config, "moe_router_group_score", "sum") != "max"
        or not config.moe_router_fusion
        or not groups
        or topk // groups == 1
    ):
        return []
    return [
        f"moe_router_fusion=True ranks groups of experts by the sum of their best {topk // groups} scores, but "
        "moe_router_group_score='max' (the rule of DeepSeek V2) ranks groups by their best score. Set "
        "moe_router_fusion=False."
    ]


def experts_need_sequence_parallel(config: Any) -> list[str]:
    """The requirement of experts with tensor parallelism, with any kind of layer."""
    tp = config.tensor_model_parallel_size
    if not config.num_moe_experts or tp == 1 or config.sequence_parallel:
        return []
    return [
        f"num_moe_experts={config.num_moe_experts} with tensor_model_parallel_size={tp} requires "
        "sequence_parallel=True, because Megatron-Core's dispatchers expect a different part of the sequence on each "
        "tensor-parallel rank. Set sequence_parallel=True."
    ]


def experts_have_no_post_norm(config: Any) -> list[str]:
    """The requirement of ``post_sublayer_layernorm`` with any kind of layer, because it normalizes the output of the last
    projection of a dense layer. Transformer Engine's grouped experts would go without."""
    if not config.num_moe_experts or not getattr(config, "post_sublayer_layernorm", False):
        return []
    return [
        "post_sublayer_layernorm=True normalizes the output of dense layers and does not apply to single experts. "
        "Set num_moe_experts=None or post_sublayer_layernorm=False."
    ]


def padded_experts_within_tokens(config: Any) -> list[str]:
    """The requirement of ``moe_pad_expert_input_to_capacity`` with any kind of layer. Megatron-Core fills an expert with
    tokens of its rank, each at most once (`megatron.core.transformer.moe.moe_utils.permute`)."""
    factor, topk, experts = config.moe_expert_capacity_factor, config.moe_router_topk, config.num_moe_experts
    if not (experts and factor and config.moe_pad_expert_input_to_capacity) or factor * topk <= experts:
        return []
    return [
        f"moe_expert_capacity_factor={factor} with moe_pad_expert_input_to_capacity=True and moe_router_topk={topk} gives "
        f"each of the {experts} experts room for more tokens than there are. Set moe_expert_capacity_factor to "
        f"{experts / topk:g} or less, or moe_pad_expert_input_to_capacity=False."
    ]


def refuse(problems: Iterable[str]) -> None:
    """Raise an error that lists all ``problems``.

    Raises:
        ConfigError: there is at least one problem.
    """
    problems = list(problems)
    if problems:
        raise ConfigError("\n".join(problems))
