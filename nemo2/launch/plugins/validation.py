# SPDX-License-Identifier: Apache-2.0
"""A plugin that rejects a run before it is submitted."""

import os
from dataclasses import dataclass
from typing import Any

import nemo_run
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo2.base.errors import ConfigError
from nemo2.config.show import diff
from nemo2.mcore.settle.machine import Machine
from nemo2.preflight.checks.facts import read_facts
from nemo2.preflight.checks.rules.launching import unequal_launch


@dataclass(kw_only=True)
class ConfigValidationPlugin(nemo_run.Plugin):
    """Reject runs whose executor would make them fail after submission.

    ``launch`` applies every rule of ``nemo2 check`` in any case. These checks concern the executor.

    Args:
        validate_preemption: On Slurm, the recipe must resume (``resume.resume_if_exists``), because Slurm restarts
            jobs.
        validate_checkpoint_dir: In a container, the run's directory must be in a mounted folder.
        validate_serialization: The recipe must be the same after it is serialized for the ranks and read back.
        validate_wandb: With ``log.wandb``, WANDB_API_KEY must be set.
        validate_nodes_and_devices: The trainer and the executor must agree on nodes and ranks per node.
    """

    validate_preemption: bool = True
    validate_checkpoint_dir: bool = True
    validate_serialization: bool = True
    validate_wandb: bool = False
    validate_nodes_and_devices: bool = True

    def setup(self, task: Any, executor: Any) -> None:
        """Check the recipe and the executor.

        Raises:
            ConfigError: with a line for each problem.
        """
        problems = [
            *(_preemption(task, executor) if self.validate_preemption else ()),
            *(_directory(task, executor) if self.validate_checkpoint_dir else ()),
            *(_serialization(task) if self.validate_serialization else ()),
            *(_wandb(task, executor) if self.validate_wandb else ()),
            *(_shape(task, executor) if self.validate_nodes_and_devices else ()),
        ]
        if problems:
            raise ConfigError("\n".join(problems))


def _preemption(task: Any, executor: Any) -> list[str]:
    resumes = getattr(getattr(task, "resume", None), "resume_if_exists", False)
    if not isinstance(executor, nemo_run.SlurmExecutor) or resumes:
        return []
    return [
        "resume.resume_if_exists is not set, so a restarted Slurm job would start from step 0. Set "
        "resume.resume_if_exists=True."
    ]


def _directory(task: Any, executor: Any) -> list[str]:
    """Check the run's directory. A relative directory is below the job's own folder, which is mounted."""
    log = getattr(task, "log", None)
    folder = getattr(log, "explicit_log_dir", None) or getattr(log, "log_dir", None)
    if not getattr(executor, "container_image", None) or not folder or not str(folder).startswith("/"):
        return []
    # On Slurm the launcher mounts the run's directory. Other executors mount only their own list.
    if isinstance(executor, nemo_run.SlurmExecutor):
        return []
    mounted = [
        *((volume.split(":") * 2)[1] for volume in getattr(executor, "volumes", ())),
        *(volume["path"] for volume in getattr(executor, "pvcs", ())),
        *(volume["mount_path"] for volume in getattr(executor, "mounts", ())),
        *(getattr(executor, "storage_mounts", None) or ()),
    ]
    if any(f"{folder}/".startswith(f"{place.rstrip('/')}/") for place in mounted):
        return []
    return [
        f"log.log_dir={str(folder)!r} is not inside a mount of the container (mounts: {', '.join(mounted) or 'none'}). "
        "Checkpoints would be lost when the container ends. Mount the directory, or set log.log_dir to a mounted "
        "directory."
    ]


def _serialization(task: Any) -> list[str]:
    """Check the round trip in nemo-run's format, in which the ranks receive the recipe."""
    form = ZlibJSONSerializer()
    try:
        changed = diff(task, form.deserialize(form.serialize(task)))
    except Exception as error:  # a user's value may raise anything
        return [
            f"The recipe can't be serialized for the ranks and read back ({type(error).__name__}: {error}). Replace "
            "the value that can't be serialized with a Config or Partial."
        ]
    return [
        f"{change.path}={change.old!r} becomes {change.new!r} when the recipe is serialized for the ranks and read "
        "back. Set a value that survives serialization."
        for change in changed
    ]


def _wandb(task: Any, executor: Any) -> list[str]:
    requested = getattr(getattr(task, "log", None), "wandb", None) is not None
    if not requested or "WANDB_API_KEY" in os.environ or "WANDB_API_KEY" in executor.env_vars:
        return []
    return [
        "log.wandb is set, but WANDB_API_KEY is not. Export WANDB_API_KEY, or set WANDB_MODE=offline and "
        "ConfigValidationPlugin.validate_wandb=False."
    ]


def _shape(task: Any, executor: Any) -> list[str]:
    if getattr(task, "trainer", None) is None:
        return []
    nodes, devices = executor.nnodes(), executor.nproc_per_node()
    return [*unequal_launch(read_facts(task, devices=devices, nodes=nodes, machine=Machine(per_node=devices)))]
