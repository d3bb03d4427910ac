# SPDX-License-Identifier: Apache-2.0
"""Rules of parallel sizes: they are numbers, and their products divide the number of GPUs."""

import math
from collections.abc import Iterator
from typing import Any

from nemo2.base.counts import counted
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.world import devices_problem, nodes_problem
from nemo2.preflight.checks.arithmetic import divisors
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

SIZES = Topic("Sizes", needs_sizes=False)
RANKS = Topic("Ranks")


@SIZES.rule("sizes-are-counts")
def _sizes(facts: Facts) -> Iterator[str]:
    """Every parallel size must be a whole number of at least 1.

    Otherwise: Megatron-Core divides by the size and raises ZeroDivisionError, or uses a process group that does not
    exist.
    """
    yield from Layout.size_problems(**facts.sizes)
    yield from facts.settled.refused("sizes-are-counts")


@SIZES.rule("nodes-and-devices-are-counts")
def _launch_counts(facts: Facts) -> Iterator[str]:
    """`trainer.num_nodes` must be at least 1. `trainer.devices` must be a number of devices, a list of device
    indices, or 'auto' for all devices of a node.

    Otherwise: The run cannot be launched.
    """
    problems = (
        nodes_problem(facts.at("trainer.num_nodes")),
        devices_problem(facts.at("trainer.devices")),
    )
    yield from (problem for problem in problems if problem is not None)


_GTP = "weights in more shards than tensor-parallel ranks"
_WITHOUT_GROUPS = {
    "hierarchical_context_parallel_sizes": "hierarchical context parallelism",
    "hybrid_context_parallel": "hybrid context parallelism",
    "max_seqlen_per_dp_cp_rank": "hybrid context parallelism",
    "tensor_parallel_num_weight_shards": _GTP,
    "gtp_weight_remat_size": _GTP,
    "expert_tensor_parallel_num_weight_shards": _GTP,
    "expert_gtp_weight_remat_size": _GTP,
}
"""Fields of a model's configuration whose process groups no strategy creates, and what these are for."""


@RANKS.rule("groups-are-created")
def _groups(facts: Facts) -> Iterator[str]:
    """Settings of process groups that `MegatronStrategy` does not create must be unset: hierarchical and hybrid context
    parallelism, and weights in more shards than tensor-parallel ranks.

    Otherwise: They have no effect, or the first step raises KeyError.
    """
    for name, kind in _WITHOUT_GROUPS.items():
        value = getattr(facts.model, name, None)
        of_tensor_ranks = (
            facts.layout.tp if name == "tensor_parallel_num_weight_shards" else facts.layout.expert_tensor_size
        )
        unset = (1, of_tensor_ranks) if kind is _GTP else ()
        if value and value not in unset:
            yield (
                f"model.config.{name}={value!r}: MegatronStrategy creates no process groups for {kind}. Leave it unset, and "
                "set the sizes of the strategy."
            )


@RANKS.rule("dense-sizes-divide-the-world", megatron_refuses=True)
def _dense_world(facts: Facts) -> Iterator[str]:
    """The product of tensor, pipeline and context parallel size must divide the number of ranks (nodes * devices).

    Otherwise: Megatron-Core raises an error when it creates the process groups.
    """
    size = facts.layout.model_parallel_size
    if facts.world_size % size:
        yield f"{_where(facts)}: {facts.layout.world_problem(facts.world_size)}"


@RANKS.rule("expert-sizes-divide-the-world", megatron_refuses=True)
def _expert_world(facts: Facts) -> Iterator[str]:
    """The product of expert tensor, expert and pipeline parallel size must divide the number of ranks (nodes *
    devices).

    Otherwise: Megatron-Core raises an error when it creates the process groups.
    """
    problem = facts.layout.world_problem(facts.world_size)
    if problem and facts.world_size % facts.layout.model_parallel_size == 0:
        yield f"{_where(facts)}: {problem}"


@RANKS.rule("replicas-before-stages", megatron_refuses=True)
def _rank_order(facts: Facts) -> Iterator[str]:
    """With `use_tp_pp_dp_mapping` and pipeline parallelism, experts must have as many replicas as the dense layers.

    Otherwise: Megatron-Core raises an error, because dense layers and experts would have different neighbors in the
    pipeline.
    """
    mapped = facts.of_strategy("use_tp_pp_dp_mapping") and not facts.layout.world_problem(facts.world_size)
    if mapped and (problem := facts.layout.mapping_problem(facts.world_size)):
        yield problem


@RANKS.rule("optimizer-instances-divide-the-replicas", megatron_refuses=True)
def _optimizer_instances(facts: Facts) -> Iterator[str]:
    """`num_distributed_optimizer_instances` must divide data-parallel size * context-parallel size, and the replicas of the
    experts.

    Otherwise: Megatron-Core raises an error when it creates the process groups.
    """
    instances, replicas = _instances(facts), facts.data_parallel_size
    if not isinstance(instances, int) or replicas is None:
        return
    shards, of_experts = replicas * facts.layout.cp, facts.world_size // facts.layout.expert_parallel_size
    if instances >= 1 and not shards % instances and of_experts % instances:
        common = math.gcd(shards, of_experts)
        yield (
            f"strategy.num_distributed_optimizer_instances={instances} does not divide the {counted(of_experts, 'replica')} of "
            f"each expert. Set it to {'one of ' if common > 1 else ''}{divisors(common)}, or use a smaller expert-parallel size."
        )
    if instances < 1 or shards % instances:
        yield (
            f"strategy.num_distributed_optimizer_instances={instances} does not divide data-parallel size * "
            f"context-parallel size = {replicas} * {facts.layout.cp} = {shards}, the number of ranks that share the "
            f"optimizer state. Set it to one of {divisors(shards)}."
        )


@RANKS.rule("optimizer-instances-need-shards")
def _instances_of_what(facts: Facts) -> Iterator[str]:
    """More than one optimizer instance requires the distributed optimizer.

    Otherwise: Megatron-Core raises an AssertionError when it wraps the model.
    """
    instances = _instances(facts)
    if isinstance(instances, int) and instances > 1 and not facts.distributed_optimizer:
        yield (
            f"strategy.num_distributed_optimizer_instances={instances} requires the distributed optimizer, which is "
            "off. Set optim.config.use_distributed_optimizer=True, or set num_distributed_optimizer_instances=1."
        )


@RANKS.rule("something-to-shard")
def _sharded(facts: Facts) -> Iterator[str]:
    """Megatron-FSDP (`strategy.fsdp`) must have at least two ranks to shard over, for dense layers and for experts, in each of
    `num_distributed_optimizer_instances`.

    Otherwise: Megatron-FSDP trains with wrong gradients: it counts some of them twice or sums them over the wrong
    ranks.
    """
    fsdp = facts.of_strategy("fsdp")
    if not fsdp or facts.layout.world_problem(facts.world_size):
        return
    from nemo2.mcore.parallel.fsdp import unshared

    has_experts, instances = bool(facts.of_model("num_moe_experts")), _instances(facts)
    problem = unshared(facts.layout, facts.world_size, has_experts=has_experts, instances=instances or 1)
    if problem:
        yield f"strategy.fsdp={fsdp!r} {problem}"


@SIZES.settled("megatron-fsdp-runs-what-is-requested")
def _megatron_fsdp() -> None:
    """`distribute_saved_activations` cannot be used with Megatron-FSDP that shards parameters, nor `mtp_detach_heads` with
    Megatron-FSDP and a clipped norm, nor `grad_norm_skip_threshold`. Several instances of its optimizer overlap the reduction of
    gradients.

    Otherwise: The first backward ends in an AssertionError, gradients are clipped by another norm, no step is skipped, or each
    instance has gradients of its own.
    """


@SIZES.rule("torch-shards-what-is-requested")
def _torch_sharded(facts: Facts) -> Iterator[str]:
    """`FSDP2Strategy` and `FSDPStrategy` support neither fp8 nor CUDA graphs, no optimizer but Adam and SGD with gradients and
    states in fp32 beside the shards, no gather of parameters by the optimizer, and tensor parallelism only of models that are not
    nemo2's. They clip by one norm, so not the gradients of `mtp_detach_heads`. `data_parallel_size` must be that of the world.

    Otherwise: Every rank stops before its first step.
    """
    strategy: Any = facts.parts.get("trainer.strategy")
    if not getattr(strategy, "sharded_by_torch", False):
        return
    yield from strategy.problems_with(facts.config, facts.precision, facts.parts.get("optim.config"))
    launched = facts.devices is not None and not facts.layout.world_problem(facts.world_size)
    if launched and (problem := strategy.world_problem(facts.world_size)):
        yield problem


def _where(facts: Facts) -> str:
    return f"trainer.num_nodes={facts.nodes}, trainer.devices={facts.devices}"


def _instances(facts: Facts) -> Any:
    """The optimizer instances, which the strategy or its gradient buffers set. None: the strategy can't be built."""
    return getattr(facts.ddp, "num_distributed_optimizer_instances", None)
