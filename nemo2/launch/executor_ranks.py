# SPDX-License-Identifier: Apache-2.0
"""Sets nodes and ranks per node on each kind of nemo-run 0.11's executors, which name them differently, and reads the
result back.

| executor | nodes | ranks per node |
|---|---|---|
| LocalExecutor | nodes | ntasks_per_node |
| SlurmExecutor | nodes | ntasks_per_node, torchrun_nproc_per_node |
| DockerExecutor | 1, always | ntasks_per_node |
| KubeflowExecutor | num_nodes | nprocs_per_node |
| SkypilotExecutor, SkypilotJobsExecutor | num_nodes | gpus_per_node |
| DGXCloudExecutor, LeptonExecutor | nodes | gpus_per_node if it is set, else nprocs_per_node |
| KubeRayExecutor | starts Ray clusters, no ranks | |
"""

from typing import Any, Optional

import nemo_run
from nemo_run.core.execution.base import Executor

from nemo2.base.advice import advice, print_warning
from nemo2.base.errors import ConfigError

_NODES = ("nodes", "num_nodes")
_RANKS_PER_NODE = ("ntasks_per_node", "torchrun_nproc_per_node", "nprocs_per_node")
"""Without the second, Slurm's executor counts the GPUs of a node or task as ranks."""


def set_ranks(executor: Any, *, devices: int, nodes: int) -> None:
    """Set the numbers of nodes and of ranks per node on ``executor``, in place.

    Raises:
        ConfigError: this kind of executor can't have them.
    """
    kind = type(executor).__name__
    if kind == "KubeRayExecutor":
        raise ConfigError(
            "KubeRayExecutor starts Ray clusters, not ranks. Use KubeflowExecutor, or an executor of Slurm or SkyPilot."
        )
    for fields, count in ((_NODES, nodes), (_RANKS_PER_NODE, devices)):
        for field in fields:
            if hasattr(executor, field):
                setattr(executor, field, count)
    gpus = getattr(executor, "gpus_per_node", None)
    counts_gpus = bool(gpus) and kind in ("DGXCloudExecutor", "LeptonExecutor", "KubeflowExecutor")
    if counts_gpus or kind.startswith("Skypilot"):
        if gpus not in (None, devices):
            print_warning(
                f"{kind}.gpus_per_node={gpus} becomes {devices}, the run's ranks per node (trainer.devices), each "
                "of which has one GPU."
            )
        executor.gpus_per_node = devices
    carried = executor.nnodes(), executor.nproc_per_node()
    if carried != (nodes, devices):
        one_node = " It starts containers on one machine. Set trainer.num_nodes=1." if kind == "DockerExecutor" else ""
        raise ConfigError(
            f"{kind} would start {carried[0]} nodes of {carried[1]} ranks, but the run has {nodes} nodes of {devices} "
            f"ranks (trainer.num_nodes, trainer.devices).{one_node}"
        )


def refuse_other_ranks(executor: Any, *, devices: Optional[int], nodes: Optional[int]) -> None:
    """Refuse an executor whose own numbers, of those that aren't their defaults, aren't the trainer's.

    Args:
        devices: ``trainer.devices``. None: the caller of the launch has named the number, which counts alone.
        nodes: The same of ``trainer.num_nodes``.

    Raises:
        ConfigError: the message names both fields.
    """
    kind = type(executor).__name__
    for names, field, argument, count in (
        (_NODES, "num_nodes", "nodes", nodes),
        (_RANKS_PER_NODE, "devices", "devices", devices),
    ):
        for name in names:
            own = getattr(executor, name, None)
            if count is not None and own not in (None, 1, count):
                raise ConfigError(
                    f"{kind}.{name}={own}, but the run has {count} (trainer.{field}). Set "
                    f"trainer.{field}={own}, leave out {name}, or name the number in the launch "
                    f"({advice(f'--{argument} {own}', f'launch(recipe, executor, {argument}={own})')})."
                )


def launcher_of(executor: Any) -> Any:
    """``executor.get_launcher()`` without its message.

    In nemo-run 0.11 Slurm's and DGX Cloud's also print that they have set ntasks_per_node to 1, in the middle of a dry
    run's script, and set fields of the launcher. nemo2's script has its own numbers, and DGX Cloud's is set up again when
    it gets its job's folder.
    """
    if isinstance(executor, nemo_run.SlurmExecutor | nemo_run.DGXCloudExecutor) and not executor._launcher_setup:
        Executor._setup_launcher(executor)
        executor._launcher_setup = True
    return executor.get_launcher()
