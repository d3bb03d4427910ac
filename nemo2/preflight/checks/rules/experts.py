# SPDX-License-Identifier: Apache-2.0
"""Rules of experts: their distribution over ranks, and their router."""

from collections.abc import Iterator

from nemo2.base.counts import is_count
from nemo2.models.layers import rules as layers
from nemo2.preflight.checks.arithmetic import indivisible
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

EXPERTS = Topic("Experts")


@EXPERTS.rule("experts-over-ranks", megatron_refuses=True)
def _share(facts: Facts) -> Iterator[str]:
    """The expert-parallel size must divide the number of experts.

    Otherwise: Megatron-Core raises an AssertionError without a message when it builds the first expert layer.
    """
    experts = facts.of_model("num_moe_experts")
    size = "strategy.expert_model_parallel_size"
    yield from indivisible("model.config.num_moe_experts", experts, size, facts.layout.ep, keep=True)


@EXPERTS.rule("expert-width-over-expert-tensor-ranks", megatron_refuses=True)
def _width(facts: Facts) -> Iterator[str]:
    """The expert tensor-parallel size must divide the width of an expert, and the tensor-parallel size must divide
    the width of the shared experts.

    Otherwise: Megatron-Core raises an AssertionError when it builds the first expert layer.
    """
    if not facts.of_model("num_moe_experts"):
        return
    etp, tp = facts.layout.expert_tensor_size, facts.layout.tp
    for name, size, ranks in (
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size", etp),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", tp),
    ):
        yield from indivisible(f"model.config.{name}", facts.of_model(name), f"strategy.{size}", ranks)


@EXPERTS.rule("experts-cut-only-where-shared")
def _cut(facts: Facts) -> Iterator[str]:
    """An expert tensor-parallel size that differs from the tensor-parallel size requires an expert-parallel size of
    at least 2.

    Otherwise: Megatron-Core sums the gradients of the experts over the wrong ranks, without an error.
    """
    yield from facts.of_layers(layers.experts_cut_only_where_shared)


@EXPERTS.rule("experts-over-tensor-ranks")
def _sequence_parallel(facts: Facts) -> Iterator[str]:
    """Experts with tensor parallelism require sequence parallelism.

    Otherwise: Megatron-Core raises an error in the first step.
    """
    yield from facts.of_layers(layers.experts_need_sequence_parallel)


@EXPERTS.rule("best-of-group-needs-plain-router")
def _best_of_group(facts: Facts) -> Iterator[str]:
    """Ranking groups of experts by their best expert (`moe_router_group_score='max'`, the rule of DeepSeek V2)
    requires the unfused router.

    Otherwise: Transformer Engine's fused router would rank the groups by sums, so the model raises an error when it is
    built.
    """
    yield from (f"model.config.{problem}" for problem in facts.of_layers(layers.best_of_group_needs_plain_router))


@EXPERTS.rule("experts-have-no-post-norm")
def _post_norm(facts: Facts) -> Iterator[str]:
    """`post_sublayer_layernorm` requires dense layers.

    Otherwise: The model raises an error when it is built. With Transformer Engine it would train without norms after experts.
    """
    yield from (f"model.config.{problem}" for problem in facts.of_layers(layers.experts_have_no_post_norm))


@EXPERTS.rule("padded-experts-within-tokens")
def _padded(facts: Facts) -> Iterator[str]:
    """Experts that are padded to their capacity (`moe_pad_expert_input_to_capacity`) require a capacity of no more tokens
    than a rank has: `moe_expert_capacity_factor` of at most `num_moe_experts` / `moe_router_topk`.

    Otherwise: PyTorch raises an error in the first step.
    """
    yield from (f"model.config.{problem}" for problem in facts.of_layers(layers.padded_experts_within_tokens))


@EXPERTS.rule("router-picks-what-there-is")
def _topk(facts: Facts) -> Iterator[str]:
    """A token can be routed to at most as many experts as the model has, and as the chosen groups of experts have.

    Otherwise: PyTorch raises an error in the first step, or tokens go to experts of other groups.
    """
    experts, topk = facts.of_model("num_moe_experts"), facts.of_model("moe_router_topk")
    if is_count(experts) and is_count(topk) and topk > experts:
        yield (
            f"model.config.moe_router_topk={topk} is more than model.config.num_moe_experts={experts}. Set "
            f"moe_router_topk to {experts} or less."
        )
    groups, of_groups = facts.of_model("moe_router_num_groups"), facts.of_model("moe_router_group_topk")
    if not all(map(is_count, (experts, topk, groups, of_groups))):
        return
    if topk > (within := of_groups * (experts // groups)):
        yield (
            f"model.config.moe_router_topk={topk} is more than the {within} experts in {of_groups} (moe_router_group_topk) of "
            f"{groups} groups (moe_router_num_groups). Set moe_router_group_topk to more, or moe_router_num_groups to less."
        )


@EXPERTS.rule("balancing-losses-have-their-weights")
def _balancing(facts: Facts) -> Iterator[str]:
    """A list of weights in `moe_aux_loss_coeff` requires a list of as many losses in `moe_router_load_balancing_type`.
    Balancing by "sinkhorn" has no loss.

    Otherwise: The first step raises an error, or Megatron-Core rejects the model configuration.
    """
    weights, losses = facts.of_model("moe_aux_loss_coeff"), facts.of_model("moe_router_load_balancing_type")
    if isinstance(weights, list) and not (isinstance(losses, list) and len(losses) == len(weights)):
        yield (
            f"model.config.moe_aux_loss_coeff={weights} with moe_router_load_balancing_type={losses!r}: each loss requires one "
            "weight. Set a number, or lists of the same length."
        )
    elif weights and losses == "sinkhorn":
        yield (
            f"model.config.moe_aux_loss_coeff={weights} with moe_router_load_balancing_type='sinkhorn': Megatron-Core's Sinkhorn "
            "routing has no loss to weigh. Set moe_aux_loss_coeff=0.0, or another moe_router_load_balancing_type."
        )


@EXPERTS.rule("shared-experts-have-no-bias", megatron_refuses=True)
def _shared_bias(facts: Facts) -> Iterator[str]:
    """Shared experts (`moe_shared_expert_intermediate_size`) require `add_bias_linear=False`.

    Otherwise: Megatron-Core raises an error when it builds the model.
    """
    if facts.of_model("moe_shared_expert_intermediate_size") and facts.of_model("add_bias_linear"):
        yield (
            "model.config.add_bias_linear=True with "
            f"moe_shared_expert_intermediate_size={facts.of_model('moe_shared_expert_intermediate_size')}: "
            "Megatron-Core's shared experts have no biases. Set add_bias_linear=False, or set "
            "moe_shared_expert_intermediate_size=None."
        )


@EXPERTS.rule("overlapped-exchange-has-no-mixers")
def _overlapped_exchange(facts: Facts) -> Iterator[str]:
    """`overlap_moe_expert_parallel_comm` does not support Mamba layers.

    Otherwise: The first step raises an error, because Megatron-Core's hybrid model has no build_schedule_plan.
    """
    model = facts.model
    if getattr(model, "overlap_moe_expert_parallel_comm", False) and hasattr(model, "mamba_stack_spec"):
        yield (
            "model.config.overlap_moe_expert_parallel_comm=True does not work with Mamba layers, whose model has no "
            "build_schedule_plan. Set overlap_moe_expert_parallel_comm=False."
        )
