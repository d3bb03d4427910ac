# SPDX-License-Identifier: Apache-2.0
"""Environment variables that ranks need before CUDA and NCCL start, derived from the recipe and the machine.

Python on a rank is too late to set them, so the launcher sets them, and a dry run shows them with their reasons. A
variable that the user has set keeps its value. If that value contradicts the run's needs, the launcher reports it.

Sources: NeMo 2.0's PerfEnvPlugin; Megatron-LM's arguments.py for FSDP, pipelines over UCC and CUDA graphs;
Megatron-Core's README on experts for the allocator; NCCL's and Transformer Engine's lists of variables.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from nemo2.config.walk import class_of
from nemo2.overlap.apply import overlap_callbacks
from nemo2.parallel.cuda_graphs import kind_of
from nemo2.settle.machine import Machine
from nemo2.settle.world import World

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
"""The variable of torch's allocator that Megatron-Core reads, and its value. torch also has a newer variable."""
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities from which on the variables below apply."""
_SM_MARGIN = "16"


class Variable(NamedTuple):
    """A value, its reason, and whether any other value breaks or slows the run."""

    value: str
    why: str
    needed: bool = False


class Ranks(NamedTuple):
    """The facts that decide the variables."""

    capability: tuple[int, int]
    """Compute capability of the GPUs."""
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    world_size: int = 1
    fsdp: bool = False
    overlapped: bool = False
    """Gradients, parameters or tensor-parallel tensors are communicated during computation."""
    registered_buffers: bool = False
    """``ddp_config.nccl_ub``: NCCL reads and writes the gradient buffers directly."""
    varying_sizes: bool = False
    """Experts without token dropping receive different numbers of tokens in each step."""
    graphs: bool = False
    """CUDA graphs capture layers or steps."""


def launch_variables(ranks: Ranks) -> dict[str, Variable]:
    """The variables of every rank on GPUs, by name."""
    found: dict[str, Variable] = {}
    cut = [f"{size} {name}" for name, size in _cuts(ranks) if size > 1]
    newer = ranks.capability >= BLACKWELL
    if ranks.fsdp:
        if cut and newer:
            found[CONNECTIONS] = Variable("32", "FSDP's gathers need queues beside those of computation", needed=True)
    elif cut and newer:
        found[CONNECTIONS] = Variable("32", f"{' and '.join(cut)} ranks exchange beside computation", needed=True)
    elif cut:
        why = f"{' and '.join(cut)} ranks exchange beside computation, which starts in its order through one queue only"
        found[CONNECTIONS] = Variable("1", why, needed=True)
    if ranks.overlapped:
        for step in ("FWD", "BWD"):
            found[f"NVTE_{step}_LAYERNORM_SM_MARGIN"] = Variable(
                _SM_MARGIN, "norms leave multiprocessors to communication that runs beside them"
            )
    if ranks.world_size > 1:
        found["TORCH_NCCL_HIGH_PRIORITY"] = Variable("1", "communication goes before computation where both wait")
    if ranks.registered_buffers:
        why = "strategy.ddp_config.nccl_ub registers buffers with NCCL"
        found["NCCL_NVLS_ENABLE"] = Variable("1", why)
        found["NCCL_CTA_POLICY"] = Variable("1", why)
    elif ranks.varying_sizes:
        found[ALLOCATOR] = Variable(
            EXPANDABLE,
            "experts get other numbers of tokens in each step, and blocks of fixed size would be left in pieces",
        )
        if ranks.graphs:
            found[GRAPH_REGISTER] = Variable("0", "captured messages would read segments that have moved", needed=True)
    return found


def objections(ranks: Ranks, environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable whose value, set by the user, contradicts the run's needs. The user's value
    stays."""
    said = []
    wanted = launch_variables(ranks)
    for name, variable in wanted.items():
        given = environment.get(name)
        if given is not None and given != variable.value and variable.needed:
            said.append(
                f"{name}={given} in the environment contradicts {variable.value}, the value for this run: "
                f"{variable.why}. nemo2 does not change it. Unset it."
            )
    if environment.get(CONNECTIONS) == "1" and CONNECTIONS not in wanted:
        if ranks.fsdp:
            said.append(
                f"{CONNECTIONS}=1 in the environment makes FSDP's gathers wait in one queue with computation. nemo2 "
                "does not change it. Unset it."
            )
        elif ranks.capability >= BLACKWELL:
            said.append(
                f"{CONNECTIONS}=1 in the environment only delays kernels on this GPU without tensor or context "
                "parallelism. nemo2 does not change it. Unset it."
            )
    expandable = EXPANDABLE in environment.get(ALLOCATOR, "")
    if expandable and ranks.graphs and environment.get(GRAPH_REGISTER) != "0" and GRAPH_REGISTER not in wanted:
        said.append(
            f"{ALLOCATOR} in the environment has {EXPANDABLE}, so CUDA graphs (model.config.cuda_graph_impl) require "
            f"{GRAPH_REGISTER}=0. Set it too."
        )
    if ranks.registered_buffers and expandable:
        said.append(
            f"{ALLOCATOR} in the environment has {EXPANDABLE}, but buffers that are registered with NCCL "
            f"(strategy.ddp_config.nccl_ub=True) cannot be in expandable segments. Remove {EXPANDABLE}."
        )
    return said


def ranks_of(recipe: Any, *, capability: tuple[int, int], devices: int, nodes: int) -> Optional[Ranks]:
    """The facts of a configured run. None for a strategy that isn't nemo2's."""
    trainer: Any = getattr(recipe, "trainer", None)
    strategy: Any = getattr(trainer, "strategy", None)
    sharded = getattr(class_of(strategy), "sharded_by_torch", False)
    if not hasattr(strategy, "tensor_model_parallel_size") and not sharded:
        return None
    ddp = getattr(strategy, "ddp", None)
    reduced = bool(getattr(ddp, "overlap_grad_reduce", False))
    model = getattr(getattr(recipe, "model", None), "config", None)
    dropless = bool(getattr(model, "num_moe_experts", None)) and not getattr(
        model, "moe_pad_expert_input_to_capacity", False
    )
    if sharded:
        cut = getattr(strategy, "tensor_parallel_size", 1)
        return Ranks(
            capability=capability,
            tensor_parallel=cut if isinstance(cut, int) else 1,  # "auto" is 1
            context_parallel=getattr(strategy, "context_parallel_size", 1),
            world_size=World(nodes, devices).size,
            fsdp=True,
            varying_sizes=dropless,
        )
    return Ranks(
        capability=capability,
        tensor_parallel=strategy.tensor_model_parallel_size,
        context_parallel=strategy.context_parallel_size,
        pipeline_parallel=strategy.pipeline_model_parallel_size,
        world_size=World(nodes, devices).size,
        fsdp=getattr(strategy, "fsdp", None) is not None or bool(getattr(ddp, "use_megatron_fsdp", False)),
        overlapped=reduced or bool(overlap_callbacks(trainer.callbacks)),
        registered_buffers=bool(getattr(ddp, "nccl_ub", False)),
        varying_sizes=dropless,
        graphs=kind_of(model) != "none",
    )


def ranks_on(machine: Machine, recipe: Any, *, devices: int, nodes: int) -> Optional[Ranks]:
    """`ranks_of` for a machine's GPUs. None without GPUs. Unknown GPUs count as Hopper, because the shipped recipes
    are laid out for Hopper."""
    if machine.accelerator != "cuda":
        return None
    return ranks_of(recipe, capability=machine.capability or HOPPER, devices=devices, nodes=nodes)


def set_variables(
    executor: Any, recipe: Any, machine: Machine, *, devices: int, nodes: int
) -> tuple[list[str], list[str]]:
    """Add the variables that a run on ``machine`` needs to ``executor.env_vars``, except variables that are already
    set.

    Returns a line with the reason for each variable, and the objections to the user's environment. Both are empty for
    runs without GPUs.
    """
    ranks = ranks_on(machine, recipe, devices=devices, nodes=nodes)
    if ranks is None or not hasattr(executor, "env_vars"):
        return [], []
    # Ranks on this machine inherit its environment. A cluster's ranks don't.
    known = {**(os.environ if machine.local else {}), **executor.env_vars}
    wanted = launch_variables(ranks)
    executor.env_vars = {
        **{name: variable.value for name, variable in wanted.items() if name not in known},
        **executor.env_vars,
    }
    lines = [f"{name}={known.get(name, one.value)}: {_reason(name, one, known)}" for name, one in wanted.items()]
    return lines, objections(ranks, known)


def _reason(name: str, variable: Variable, known: Mapping[str, str]) -> str:
    return "from the environment" if name in known else variable.why


def _cuts(ranks: Ranks) -> tuple[tuple[str, int], ...]:
    return (("tensor-parallel", ranks.tensor_parallel), ("context-parallel", ranks.context_parallel))
