# SPDX-License-Identifier: Apache-2.0
"""Compares the GPUs that an executor requests with the ranks of a run, each of which needs one."""

import re
from collections.abc import Iterator
from typing import Any

from nemo_run.core.execution.launcher import Launcher

from nemo2.base.advice import advice, print_warning
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.launch.executor_ranks import launcher_of

_RESOURCE = re.compile(r"(?:gres/)?gpu(?::[^:,=]*[^:,=\d][^:,=]*)?(?:[:=](\d+))?\Z")

_SHAPE = re.compile(r"gpu\.(?:(\d+)x)?")
"""The beginning of Lepton's names of shapes, such as gpu.8xh100-sxm and gpu.a10."""


def check_gpus(executor: Any, recipe: Any, *, devices: int, nodes: int) -> None:
    """Refuse an executor that requests fewer GPUs per node than there are ranks. Report one that requests more, or none.
    `nemo2.launch.executor_ranks` sets the number on the executors whose ranks are counted in GPUs.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    for request, gpus in _requests(executor, devices=devices):
        if gpus < devices:
            splits = gpus and not devices % gpus and type(executor).__name__ != "DockerExecutor"  # which has one node
            fit = f"{nodes * devices // gpus} nodes of {gpus}, or " if splits else ""
            raise ConfigError(
                f"trainer.devices={devices}: the executor requests only {counted(gpus, 'GPU')} per node ({request}), but "
                f"each rank needs one. Use {fit}nodes of at most {gpus} ({advice('--devices', 'devices')}={gpus}), or "
                f"correct {request.partition('=')[0]}."
            )
        if gpus > devices:
            print_warning(
                f"{request} requests {gpus} GPUs per node, of which the run uses {devices} (trainer.devices)."
            )
    field = _without_gpus(executor)
    if field and getattr(getattr(recipe, "trainer", None), "accelerator", None) != "cpu":
        kind, value = type(executor).__name__, getattr(executor, field)
        print_warning(f"{kind}.{field}={value!r} requests no GPU, so the ranks train on CPUs or fail. Set {field}.")


def _requests(executor: Any, *, devices: int) -> Iterator[tuple[str, int]]:
    """The settings that request GPUs, and the number on each node."""
    kind = type(executor).__name__
    if kind == "DockerExecutor" and (executor.num_gpus or 0) > 0:  # -1: all
        yield f"num_gpus={executor.num_gpus}", executor.num_gpus
    if kind == "LeptonExecutor" and (match := _SHAPE.match(executor.resource_shape)):
        yield f"resource_shape={executor.resource_shape}", int(match[1] or 1)
    if kind != "SlurmExecutor":
        return
    if gpus := executor.gpus_per_node:
        yield f"gpus_per_node={gpus}", gpus
    if resources := [match for word in (executor.gres or "").split(",") if (match := _RESOURCE.match(word.strip()))]:
        yield f"gres={executor.gres}", sum(int(match[1] or 1) for match in resources)
    if gpus := executor.gpus_per_task:
        by_srun = type(launcher_of(executor)) is Launcher
        yield f"gpus_per_task={gpus}{'' if by_srun else ' of one torchrun'}", gpus * (devices if by_srun else 1)


def _without_gpus(executor: Any) -> str:
    """The field by which this executor would request GPUs, if it requests none. "": it may request some."""
    kind = type(executor).__name__
    if kind == "DockerExecutor":
        other = executor.runtime or "device_requests" in executor.additional_kwargs
        return "" if executor.num_gpus or other else "num_gpus"
    if kind.startswith("Skypilot"):
        return "" if executor.gpus or executor.instance_type else "gpus"
    if kind == "DGXCloudExecutor":
        return "" if executor.gpus_per_node or "compute" in executor.custom_spec else "gpus_per_node"
    if kind == "LeptonExecutor":
        return "resource_shape" if executor.resource_shape.startswith("cpu.") else ""
    if kind == "SlurmExecutor":  # a partition may have GPUs without a request
        return "gpus_per_node" if executor.gpus_per_node == 0 and not list(_requests(executor, devices=1)) else ""
    return ""
