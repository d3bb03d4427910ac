# SPDX-License-Identifier: Apache-2.0
"""Environment variables that ranks need before CUDA and NCCL start, derived from the recipe and the machine.

Python on a rank is too late to set them, so the launcher sets them, and a dry run shows them with their reasons. A
variable that the user has set keeps its value. If that value contradicts the run's needs, the launcher reports it.
`variable_origins` lists who sets each variable: the launcher, this shell, the executor or its profile, each plugin.

Sources: NeMo 2.0's PerfEnvPlugin; Megatron-LM's arguments.py for FSDP, pipelines over UCC and CUDA graphs;
Megatron-Core's README on experts for the allocator; NCCL's and Transformer Engine's lists of variables.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import nemo_run

from nemo2.base.advice import print_warning
from nemo2.config.walk import callbacks_of, class_of
from nemo2.launch.executor_ranks import set_ranks
from nemo2.launch.local import split_secrets
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.run_settings import overlap_callbacks
from nemo2.mcore.settle.world import World

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
"""The variable of torch's allocator that Megatron-Core reads, and its value. torch also has a newer variable."""
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
RESTARTS = "PET_MAX_RESTARTS"
"""torchrun's variable for ``--max-restarts``, which nvidia-resiliency-ext's launcher reads too, because it derives
from torchrun."""
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
    variables: dict[str, Variable] = {}
    sizes = {"tensor-parallel": ranks.tensor_parallel, "context-parallel": ranks.context_parallel}
    cut = [f"{size} {name}" for name, size in sizes.items() if size > 1]
    newer = ranks.capability >= BLACKWELL
    why = f"{' and '.join(cut)} ranks exchange beside computation"
    if cut and newer:
        why = "FSDP's gathers need queues beside those of computation" if ranks.fsdp else why
        variables[CONNECTIONS] = Variable("32", why, needed=True)
    elif cut and not ranks.fsdp:
        why += ", which starts in its order through one queue only"
        variables[CONNECTIONS] = Variable("1", why, needed=True)
    if ranks.overlapped:
        for step in ("FWD", "BWD"):
            variables[f"NVTE_{step}_LAYERNORM_SM_MARGIN"] = Variable(
                _SM_MARGIN, "norms leave multiprocessors to communication that runs beside them"
            )
    if ranks.world_size > 1:
        variables["TORCH_NCCL_HIGH_PRIORITY"] = Variable("1", "communication goes before computation where both wait")
    if ranks.registered_buffers:
        why = "strategy.ddp_config.nccl_ub registers buffers with NCCL"
        variables["NCCL_NVLS_ENABLE"] = Variable("1", why)
        variables["NCCL_CTA_POLICY"] = Variable("1", why)
    elif ranks.varying_sizes:
        variables[ALLOCATOR] = Variable(
            EXPANDABLE,
            "experts get other numbers of tokens in each step, and blocks of fixed size would be left in pieces",
        )
        if ranks.graphs:
            variables[GRAPH_REGISTER] = Variable(
                "0", "captured messages would read segments that have moved", needed=True
            )
    return variables


def objections(ranks: Ranks, environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable whose value, set by the user, contradicts the run's needs. The user's value
    stays."""
    warnings = []
    required = launch_variables(ranks)
    for name, variable in required.items():
        value = environment.get(name)
        if value is not None and value != variable.value and variable.needed:
            warnings.append(
                f"{name}={value} in the environment contradicts {variable.value}, the value for this run: "
                f"{variable.why}. nemo2 does not change it. Unset it."
            )
    if environment.get(CONNECTIONS) == "1" and CONNECTIONS not in required:
        if ranks.fsdp:
            warnings.append(
                f"{CONNECTIONS}=1 in the environment makes FSDP's gathers wait in one queue with computation. nemo2 "
                "does not change it. Unset it."
            )
        elif ranks.capability >= BLACKWELL:
            warnings.append(
                f"{CONNECTIONS}=1 in the environment only delays kernels on this GPU without tensor or context "
                "parallelism. nemo2 does not change it. Unset it."
            )
    return warnings


def ranks_of(recipe: Any, *, capability: tuple[int, int], devices: int, nodes: int) -> Optional[Ranks]:
    """The facts of a configured run. None for a strategy that isn't nemo2's."""
    trainer: Any = getattr(recipe, "trainer", None)
    strategy: Any = getattr(trainer, "strategy", None)
    sharded = getattr(class_of(strategy), "sharded_by_torch", False)
    if not hasattr(strategy, "tensor_model_parallel_size") and not sharded:
        return None
    ddp = getattr(strategy, "ddp", None)
    model = getattr(getattr(recipe, "model", None), "config", None)
    dropless = bool(getattr(model, "num_moe_experts", None)) and not getattr(
        model, "moe_pad_expert_input_to_capacity", False
    )
    layout = Layout.of(strategy)
    ranks = Ranks(
        capability=capability,
        tensor_parallel=layout.tp,
        context_parallel=layout.cp,
        pipeline_parallel=layout.pp,
        world_size=World(nodes, devices).size,
        varying_sizes=dropless,
    )
    if sharded:
        return ranks._replace(fsdp=True)
    reduced = bool(getattr(ddp, "overlap_grad_reduce", False))
    return ranks._replace(
        fsdp=getattr(strategy, "fsdp", None) is not None or bool(getattr(ddp, "use_megatron_fsdp", False)),
        overlapped=reduced or bool(overlap_callbacks(callbacks_of(trainer))),
        registered_buffers=bool(getattr(ddp, "nccl_ub", False)),
        graphs=kind_of(model) != "none",
    )


def ranks_on(machine: Machine, recipe: Any, *, devices: int, nodes: int) -> Optional[Ranks]:
    """`ranks_of` for a machine's GPUs. None without GPUs. Unknown GPUs count as Hopper, because the shipped recipes
    are laid out for Hopper."""
    if machine.accelerator != "cuda":
        return None
    return ranks_of(recipe, capability=machine.capability or HOPPER, devices=devices, nodes=nodes)


def known_variables(executor: Any, machine: Machine) -> dict[str, str]:
    """The variables of the ranks that the launcher knows. Those on this machine inherit its environment, a cluster's don't."""
    return {**(os.environ if machine.local else {}), **executor.env_vars}


def set_variables(executor: Any, recipe: Any, machine: Machine, *, devices: int, nodes: int) -> list[str]:
    """Add the variables that a run on ``machine`` needs to ``executor.env_vars``, except variables that are already
    set. Warns on stderr of those whose values contradict the run, unless a rule refuses them (`nemo2.preflight.checks`).

    Returns a line with the reason for each variable. Empty for runs without GPUs.
    """
    ranks = ranks_on(machine, recipe, devices=devices, nodes=nodes)
    if ranks is None:
        return []
    present = known_variables(executor, machine)
    required = launch_variables(ranks)
    defaults = {name: variable.value for name, variable in required.items() if name not in present}
    executor.env_vars = {**defaults, **executor.env_vars}
    for warning in objections(ranks, present):
        print_warning(warning)
    return [
        f"{name}={present[name]}: from the environment" if name in present else f"{name}={value.value}: {value.why}"
        for name, value in required.items()
    ]


class Origin(NamedTuple):
    """A value of a variable and who sets it."""

    value: str
    who: str


def variable_origins(
    recipe: Any,
    executor: Any,
    machine: Machine,
    *,
    plugins: Sequence[Any] = (),
    devices: int,
    nodes: int,
    profile: str = "",
) -> dict[str, list[Origin]]:
    """The values of each variable, in rising precedence. Plugins edit ``recipe`` and ``executor``, so pass copies.

    Args:
        executor: None: torchrun on this machine.
        profile: The executor's name, for messages.

    Raises:
        ConfigError: a plugin rejects the run, or the executor can't have this shape.
    """
    executor = executor or nemo_run.LocalExecutor(launcher="torchrun")
    set_ranks(executor, devices=devices, nodes=nodes)
    set_by: list[tuple[str, dict[str, str]]] = [(profile or type(executor).__name__, dict(executor.env_vars))]
    for plugin in plugins:
        before = dict(executor.env_vars)
        plugin.setup(recipe, executor)
        changed = {name: value for name, value in executor.env_vars.items() if before.get(name) != value}
        set_by.append((type(plugin).__name__, changed))
    origins: dict[str, list[Origin]] = {}
    ranks = ranks_on(machine, recipe, devices=devices, nodes=nodes)
    for name, variable in (launch_variables(ranks) if ranks else {}).items():
        origins[name] = [Origin(variable.value, f"the launcher: {variable.why}")]
        if machine.local and name in os.environ:
            origins[name].append(Origin(os.environ[name], "this shell"))
    for who, variables in set_by:
        secrets = split_secrets(variables)[1]
        for name, value in variables.items():
            origins.setdefault(name, []).append(Origin("***" if name in secrets else value, who))
    return origins


def origin_lines(origins: Mapping[str, list[Origin]]) -> list[str]:
    """A paragraph per variable: the value that the ranks receive, and the overridden values with who set them."""
    lines = []
    for name in sorted(origins):
        *others, last = origins[name]
        lines.append(f"{name}={last.value}  ({last.who})")
        lines += [f"    before that {one.value}  ({one.who})" for one in reversed(others) if one.value != last.value]
    return lines
