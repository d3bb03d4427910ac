# SPDX-License-Identifier: Apache-2.0
"""Rules of experts: their distribution over ranks, and their router."""

from collections.abc import Iterator

from nemo2.checks.arithmetic import divisors, is_count, nearest
from nemo2.checks.facts import Facts
from nemo2.checks.rule import Topic
from nemo2.checks.rules.world import EP, ETP, TP
from nemo2.models.layers import rules as layers

EXPERTS = Topic("Experts", recipe="deepseek_v2_lite")
_SP = "strategy.sequence_parallel=True"


@EXPERTS.rule(
    "experts-to-share",
    says="Expert parallelism requires a model with experts.",
    otherwise="Megatron-Core rejects the model configuration.",
    recipe="llama3_8b",
    broken=f"{EP}=2",
    mended=f"{EP}=1",
    megatron_refuses=True,
)
def _dense(facts: Facts) -> Iterator[str]:
    if facts.layout.ep > 1 and facts.model is not None and not facts.of_model("num_moe_experts"):
        yield (
            f"strategy.expert_model_parallel_size={facts.layout.ep}: this model has no experts "
            "(model.config.num_moe_experts is unset). Set expert_model_parallel_size=1."
        )


@EXPERTS.rule(
    "experts-over-ranks",
    says="The expert-parallel size must divide the number of experts.",
    otherwise="Megatron-Core raises an AssertionError without a message when it builds the first expert layer.",
    broken=f"{EP}=8 model.config.num_moe_experts=60",
    mended=f"{EP}=8 model.config.num_moe_experts=64",
    megatron_refuses=True,
)
def _share(facts: Facts) -> Iterator[str]:
    experts, ep = facts.of_model("num_moe_experts"), facts.layout.ep
    if is_count(experts) and experts % ep:
        yield (
            f"model.config.num_moe_experts={experts} is not a multiple of strategy.expert_model_parallel_size={ep}. "
            f"Set expert_model_parallel_size to one of the sizes that divide it: {divisors(experts)}."
        )


@EXPERTS.rule(
    "expert-width-over-expert-tensor-ranks",
    says="The expert tensor-parallel size must divide the width of an expert, and the tensor-parallel size must "
    "divide the width of the shared experts.",
    otherwise="Megatron-Core raises an AssertionError when it builds the first expert layer.",
    broken=f"{TP}=2 {ETP}=2 {EP}=4 {_SP} model.config.moe_ffn_hidden_size=1407",
    mended=f"{TP}=2 {ETP}=2 {EP}=4 {_SP} model.config.moe_ffn_hidden_size=1408",
    megatron_refuses=True,
)
def _width(facts: Facts) -> Iterator[str]:
    if not facts.of_model("num_moe_experts"):
        return
    etp, tp = facts.layout.expert_tensor_size, facts.layout.tp
    for name, size, ranks in (
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size", etp),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", tp),
    ):
        width = facts.of_model(name)
        if is_count(width) and width % ranks:
            yield (
                f"model.config.{name}={width} is not a multiple of strategy.{size}={ranks}. Set it to a multiple; "
                f"nearest: {nearest(width, ranks)}."
            )


@EXPERTS.rule(
    "experts-cut-only-where-shared",
    says="An expert tensor-parallel size that differs from the tensor-parallel size requires an expert-parallel size "
    "of at least 2.",
    otherwise="Megatron-Core sums the gradients of the experts over the wrong ranks, without an error.",
    broken=f"{TP}=2 {ETP}=1 {EP}=1 {_SP}",
    mended=f"{TP}=2 {ETP}=1 {EP}=2 {_SP}",
)
def _cut(facts: Facts) -> Iterator[str]:
    if facts.sized_config is not None:
        yield from layers.experts_cut_only_where_shared(facts.sized_config)


@EXPERTS.rule(
    "experts-over-tensor-ranks",
    says="Experts with tensor parallelism require sequence parallelism.",
    otherwise="Megatron-Core raises an error in the first step.",
    broken=f"{TP}=2 {ETP}=1 model.config.multi_latent_attention=False",
    mended=f"{TP}=2 {ETP}=1 {_SP}",
)
def _sequence_parallel(facts: Facts) -> Iterator[str]:
    if facts.sized_config is not None:
        yield from layers.experts_need_sequence_parallel(facts.sized_config)


@EXPERTS.rule(
    "whole-bias-on-one-rank",
    says="Experts with a bias (`add_bias_linear`) require an expert tensor-parallel size of 1.",
    otherwise="Each rank that holds a part of an expert adds the whole bias. Megatron-Core 0.16 and newer raises an "
    "AssertionError instead.",
    recipe="mixtral_8x7b",
    broken=f"{TP}=2 {_SP} {EP}=4 model.config.add_bias_linear=True",
    mended=f"{TP}=2 {_SP} {EP}=4 model.config.add_bias_linear=True {ETP}=1",
)
def _bias(facts: Facts) -> Iterator[str]:
    if facts.sized_config is not None:
        yield from layers.whole_bias_on_one_rank(facts.sized_config)


@EXPERTS.rule(
    "best-of-group-needs-plain-router",
    says="Ranking groups of experts by their best expert (`moe_router_group_score='max'`, the rule of DeepSeek V2) "
    "requires the unfused router.",
    otherwise="Transformer Engine's fused router would rank the groups by sums, so the model raises an error when it "
    "is built.",
    recipe="deepseek_v2",
    broken="model.config.moe_router_fusion=True",
    mended="model.config.moe_router_fusion=False",
)
def _best_of_group(facts: Facts) -> Iterator[str]:
    if facts.sized_config is not None:
        for problem in layers.best_of_group_needs_plain_router(facts.sized_config):
            yield f"model.config.{problem}"


@EXPERTS.rule(
    "router-picks-what-there-is",
    says="A token can be routed to at most as many experts as the model has.",
    otherwise="PyTorch raises an error in the first step.",
    broken="model.config.moe_router_topk=65",
    mended="model.config.moe_router_topk=64",
)
def _topk(facts: Facts) -> Iterator[str]:
    experts, topk = facts.of_model("num_moe_experts"), facts.of_model("moe_router_topk")
    if is_count(experts) and is_count(topk) and topk > experts:
        yield (
            f"model.config.moe_router_topk={topk} is more than model.config.num_moe_experts={experts}. Set "
            f"moe_router_topk to {experts} or less."
        )


@EXPERTS.rule(
    "one-expert-needs-softmax-first",
    says="One expert per token with softmax scores requires `moe_router_pre_softmax`.",
    otherwise="Megatron-Core rejects the model configuration, because a softmax over one score has no gradient.",
    recipe="mixtral_8x7b",
    broken="model.config.moe_router_topk=1",
    mended="model.config.moe_router_topk=1 model.config.moe_router_pre_softmax=True",
    megatron_refuses=True,
)
def _pre_softmax(facts: Facts) -> Iterator[str]:
    if (
        facts.of_model("num_moe_experts")
        and facts.of_model("moe_router_topk") == 1
        and facts.of_model("moe_router_score_function") == "softmax"
        and not facts.of_model("moe_router_pre_softmax")
        and facts.of_model("moe_router_load_balancing_type") != "sinkhorn"
    ):
        yield (
            "model.config.moe_router_topk=1 with softmax scores: a softmax over the single selected score has no "
            "gradient. Set model.config.moe_router_pre_softmax=True."
        )


@EXPERTS.rule(
    "experts-in-equal-groups",
    says="Group-limited routing must set the number of groups. This number must divide the number of experts, and the "
    "router can select at most all groups.",
    otherwise="Megatron-Core rejects the model configuration.",
    broken="model.config.moe_router_group_topk=2 model.config.moe_router_num_groups=7",
    mended="model.config.moe_router_group_topk=2 model.config.moe_router_num_groups=8",
    megatron_refuses=True,
)
def _router_groups(facts: Facts) -> Iterator[str]:
    picked, groups, experts = (
        facts.of_model("moe_router_group_topk"),
        facts.of_model("moe_router_num_groups"),
        facts.of_model("num_moe_experts"),
    )
    if not picked or not is_count(experts):
        return
    if not groups:
        yield (
            f"model.config.moe_router_group_topk={picked} requires model.config.moe_router_num_groups. Set it to a "
            f"divisor of the {experts} experts: {divisors(experts)}."
        )
    elif experts % groups:
        yield (
            f"model.config.num_moe_experts={experts} is not a multiple of "
            f"model.config.moe_router_num_groups={groups}. Set moe_router_num_groups to one of {divisors(experts)}."
        )
    elif picked > groups:
        yield (
            f"model.config.moe_router_group_topk={picked} is more than model.config.moe_router_num_groups={groups}. "
            f"Set moe_router_group_topk to {groups} or less."
        )


@EXPERTS.rule(
    "padding-needs-a-capacity",
    says="`moe_pad_expert_input_to_capacity` requires `moe_expert_capacity_factor`.",
    otherwise="Megatron-Core rejects the model configuration.",
    broken="model.config.moe_pad_expert_input_to_capacity=True",
    mended="model.config.moe_pad_expert_input_to_capacity=True model.config.moe_expert_capacity_factor=1.0",
    megatron_refuses=True,
)
def _capacity(facts: Facts) -> Iterator[str]:
    model = facts.model
    if getattr(model, "moe_pad_expert_input_to_capacity", False) and model.moe_expert_capacity_factor is None:
        yield (
            "model.config.moe_pad_expert_input_to_capacity=True pads to the capacity that "
            "model.config.moe_expert_capacity_factor gives, but the factor is unset. Set moe_expert_capacity_factor "
            "(1.0 drops all tokens beyond an even share), or set moe_pad_expert_input_to_capacity=False."
        )


@EXPERTS.rule(
    "capacity-needs-balancing",
    says="`moe_expert_capacity_factor` requires the load balancing aux_loss, seq_aux_loss, global_aux_loss or none.",
    otherwise="Megatron-Core rejects the model configuration.",
    recipe="mixtral_8x7b",
    broken="model.config.moe_expert_capacity_factor=1.0 model.config.moe_router_load_balancing_type=sinkhorn",
    mended="model.config.moe_expert_capacity_factor=1.0 model.config.moe_router_load_balancing_type=aux_loss",
    megatron_refuses=True,
)
def _balancing(facts: Facts) -> Iterator[str]:
    factor, kinds = facts.of_model("moe_expert_capacity_factor"), facts.of_model("moe_router_load_balancing_type")
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
    if not facts.of_model("num_moe_experts") or factor is None or factor < 0:
        return
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in known:
            yield (
                f"model.config.moe_expert_capacity_factor={factor} does not support "
                f"moe_router_load_balancing_type={kind!r}. Set moe_router_load_balancing_type to one of "
                f"{', '.join(known)}."
            )


@EXPERTS.rule(
    "overlapped-shared-experts-need-all-to-all",
    says="`moe_shared_expert_overlap` requires the alltoall dispatcher.",
    otherwise="Megatron-Core rejects the model configuration.",
    broken="model.config.moe_shared_expert_overlap=True model.config.moe_token_dispatcher_type=allgather",
    mended="model.config.moe_shared_expert_overlap=True model.config.moe_token_dispatcher_type=alltoall",
    megatron_refuses=True,
)
def _shared_overlap(facts: Facts) -> Iterator[str]:
    model = facts.model
    if not getattr(model, "moe_shared_expert_overlap", False) or model.moe_shared_expert_intermediate_size is None:
        return
    if model.moe_token_dispatcher_type not in ("alltoall", "flex"):
        yield (
            "model.config.moe_shared_expert_overlap=True with "
            f"moe_token_dispatcher_type={model.moe_token_dispatcher_type!r}: only the communication of 'alltoall' can "
            "overlap with shared experts. Set moe_token_dispatcher_type='alltoall', or set "
            "moe_shared_expert_overlap=False."
        )


@EXPERTS.rule(
    "shared-experts-have-no-bias",
    says="Shared experts (`moe_shared_expert_intermediate_size`) require `add_bias_linear=False`.",
    otherwise="Megatron-Core raises an error when it builds the model.",
    broken="model.config.moe_shared_expert_intermediate_size=512 model.config.add_bias_linear=True",
    mended="model.config.moe_shared_expert_intermediate_size=512 model.config.add_bias_linear=False",
    megatron_refuses=True,
)
def _shared_bias(facts: Facts) -> Iterator[str]:
    if facts.of_model("moe_shared_expert_intermediate_size") and facts.of_model("add_bias_linear"):
        yield (
            "model.config.add_bias_linear=True with "
            f"moe_shared_expert_intermediate_size={facts.of_model('moe_shared_expert_intermediate_size')}: "
            "Megatron-Core's shared experts have no biases. Set add_bias_linear=False, or set "
            "moe_shared_expert_intermediate_size=None."
        )


@EXPERTS.rule(
    "expert-bias-needs-sigmoid",
    says="`moe_router_enable_expert_bias` requires sigmoid scores.",
    otherwise="Megatron-Core rejects the model configuration.",
    broken="model.config.moe_router_enable_expert_bias=True model.config.moe_router_score_function=softmax",
    mended="model.config.moe_router_enable_expert_bias=True model.config.moe_router_score_function=sigmoid",
    megatron_refuses=True,
)
def _expert_bias(facts: Facts) -> Iterator[str]:
    score = getattr(facts.model, "moe_router_score_function", None)
    if getattr(facts.model, "moe_router_enable_expert_bias", False) and score not in ("sigmoid", "sqrtsoftplus"):
        yield (
            f"model.config.moe_router_enable_expert_bias=True with moe_router_score_function={score!r}: a bias can "
            "balance 'sigmoid' scores only. Set moe_router_score_function='sigmoid', or use an auxiliary loss "
            "instead of the bias."
        )


@EXPERTS.rule(
    "experts-have-their-width-alone",
    says="`moe_ffn_hidden_size` requires a model with experts.",
    otherwise="Megatron-Core rejects the model configuration.",
    recipe="llama3_8b",
    broken="model.config.moe_ffn_hidden_size=1024",
    mended="model.config.ffn_hidden_size=1024",
    megatron_refuses=True,
)
def _width_without_experts(facts: Facts) -> Iterator[str]:
    width = getattr(facts.model, "moe_ffn_hidden_size", None)
    if width is not None and getattr(facts.model, "num_moe_experts", None) is None:
        yield f"model.config.moe_ffn_hidden_size={width}: this model has no experts. Set model.config.ffn_hidden_size instead."


@EXPERTS.rule(
    "a-weight-for-every-balancing",
    says="A list of load balancing types requires a list of `moe_aux_loss_coeff` with the same length.",
    otherwise="Megatron-Core rejects the model configuration.",
    recipe="mixtral_8x7b",
    broken="model.config.moe_router_load_balancing_type=['aux_loss','seq_aux_loss'] model.config.moe_aux_loss_coeff=[0.01]",
    mended="model.config.moe_router_load_balancing_type=['aux_loss','seq_aux_loss'] "
    "model.config.moe_aux_loss_coeff=[0.01,0.01]",
    megatron_refuses=True,
)
def _weights(facts: Facts) -> Iterator[str]:
    kinds, weights = (
        getattr(facts.model, name, None) for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    )
    if isinstance(kinds, list) and (not isinstance(weights, list) or len(weights) != len(kinds)):
        yield (
            f"model.config.moe_router_load_balancing_type lists {len(kinds)} types, but "
            f"model.config.moe_aux_loss_coeff={weights}. Set moe_aux_loss_coeff to a list with one coefficient per "
            "type."
        )


@EXPERTS.rule(
    "overlapped-exchange",
    says="`overlap_moe_expert_parallel_comm` requires an expert-parallel size of at least 2, the alltoall dispatcher "
    "and bf16 or fp16. It supports neither full recomputation nor Mamba layers, and with pipeline parallelism it requires "
    "virtual stages.",
    otherwise="Megatron-Core rejects the model configuration.",
    recipe="mixtral_8x7b",
    broken=f"model.config.overlap_moe_expert_parallel_comm=True {EP}=1",
    mended=f"model.config.overlap_moe_expert_parallel_comm=True {EP}=8",
    megatron_refuses=True,
)
def _overlapped_exchange(facts: Facts) -> Iterator[str]:
    model, layout = facts.model, facts.layout
    if not getattr(model, "overlap_moe_expert_parallel_comm", False):
        return
    precision = facts.precision
    obstacles = {
        "strategy.expert_model_parallel_size=1": layout.ep == 1,
        "pipeline parallelism without virtual stages": layout.pp > 1 and layout.vp is None,
        f"moe_token_dispatcher_type={model.moe_token_dispatcher_type!r}": model.moe_token_dispatcher_type
        not in ("alltoall", "flex"),
        "full recomputation": model.recompute_granularity == "full" or model.recompute_method is not None,
        "moe_shared_expert_overlap=True": bool(model.moe_shared_expert_overlap),
        "fp32": precision is not None and precision.fp32,
        "Mamba layers, whose model has no build_schedule_plan": hasattr(model, "mamba_stack_spec"),
        f"mtp_num_layers={getattr(model, 'mtp_num_layers', None)}": (getattr(model, "mtp_num_layers", None) or 0) > 1,
    }
    found = [obstacle for obstacle, there in obstacles.items() if there]
    if found:
        yield (
            f"model.config.overlap_moe_expert_parallel_comm=True does not work with {', '.join(found)}. Change these "
            "settings, or set overlap_moe_expert_parallel_comm=False."
        )


@EXPERTS.rule(
    "delayed-gradients-need-overlap",
    says="`delay_wgrad_compute` requires `overlap_moe_expert_parallel_comm`.",
    otherwise="Megatron-Core rejects the model configuration.",
    recipe="mixtral_8x7b",
    broken="model.config.delay_wgrad_compute=True",
    mended="model.config.delay_wgrad_compute=True model.config.overlap_moe_expert_parallel_comm=True",
    megatron_refuses=True,
)
def _delayed(facts: Facts) -> Iterator[str]:
    model = facts.model
    if getattr(model, "delay_wgrad_compute", False) and not getattr(model, "overlap_moe_expert_parallel_comm", False):
        yield (
            "model.config.delay_wgrad_compute=True requires model.config.overlap_moe_expert_parallel_comm=True, "
            "because the delayed computation overlaps with that communication. Set both to True, or both to False."
        )
