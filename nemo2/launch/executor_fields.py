# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of nemo-run's executors before a launch reads them, and reports those that have no effect.

nemo-run 0.11 checks none of them: a text in place of a list becomes a list of letters, a wrong launcher is a KeyError,
and a rank of a launch without torchrun waits for ranks that nothing starts.
"""

import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun

from nemo2.base.advice import print_warning
from nemo2.base.errors import ConfigError
from nemo2.base.place import PORT, SET_ON_RANKS
from nemo2.config.domains import Domain, out_of_range
from nemo2.config.value_types import mistyped
from nemo2.training.run_dir.environment import is_secret_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ULIMIT = re.compile(r"\w+:-?\d+(:-?\d+)?\Z")
_LOSES_RECORDINGS = ("DockerExecutor", "SkypilotExecutor", "SkypilotJobsExecutor")
_NEEDED = {
    "DockerExecutor": ("container_image",),
    "DGXCloudExecutor": (
        *("base_url", "client_id", "client_secret", "project_name", "container_image", "pvc_nemo_run_dir"),
        "distributed_framework",
    ),
    "LeptonExecutor": ("container_image", "nemo_run_dir", "node_group", "resource_shape"),
    "KubeflowExecutor": ("namespace", "runtime_ref"),
}
"""Fields of text without which no job is made, by the executor's class."""
_COUNTS = {
    name: Domain(interval, why, kind=kind)
    for names, kind, interval, why in (
        ("nodes num_nodes", "whole", "[1, inf)", "machines of a job"),
        ("ntasks_per_node torchrun_nproc_per_node nprocs_per_node", "whole", "[1, inf)", "processes of a node"),
        ("gpus_per_node gpus_per_task retries max_restarts", "whole", "[0, inf)", "0: none"),
        ("num_gpus", "whole", "[-1, inf)", "-1: all"),
        ("cpus_per_task cpus_per_gpu", "whole", "[1, inf)", "cores"),
        ("cpus", "real", "(0, inf)", "cores of a node"),
        ("memory", "real", "(0, inf)", "GiB of a node"),
        ("disk_size", "whole", "[1, inf)", "GiB of a node"),
        ("shared_memory_size", "whole", "[1, inf)", "MiB, through which workers pass batches"),
        ("segment", "whole", "[1, inf)", "nodes on a switch"),
        ("het_group_indices", "whole", "[0, inf)", "numbers of groups"),
        ("rdzv_port", "whole", "[0, 65535]", "0: any free port"),
        ("workload_check_interval", "real", "(0, inf)", "seconds"),
        ("initial_rank_heartbeat_timeout rank_heartbeat_timeout", "real", "(0, inf)", "seconds"),
    )
    for name in names.split()
}
"""The numbers that schedulers and launchers accept, by field."""
_VOLUME_KEYS = {"DGXCloudExecutor": {"pvcs": ("path",)}, "LeptonExecutor": {"mounts": ("path", "mount_path")}}
_REFERENCE = re.compile(r"\$\{?[A-Za-z_]")
_GROUPS = "nemo2 starts one task of srun"
_ONCE = "nemo-run submits the run once. FaultTolerancePlugin restarts its ranks"
_RAY = "nemo2 starts no Ray cluster"
_OWN_CLUSTER = "a managed job has a cluster of its own"
_UNUSED: dict[str, dict[str, str]] = {
    "SlurmExecutor": {
        "open_mode": "the job's output is always appended to, because all starts of a job are read from it",
        "memory_measure": "nemo2 doesn't start nemo-run's measurement",
        "dependency_type": "set additional_parameters={'dependency': 'afterok:123'} instead",
        "job_details": "the job's folder has a fixed layout. Set tunnel.job_dir and job_name_prefix instead",
        "ray_template": _RAY,
        **dict.fromkeys(("wait_time_for_group_job", "monitor_group_job", "monitor_group_job_wait_time"), _GROUPS),
    },
    "LocalExecutor": {
        "retries": "a run on this machine is not started again. FaultTolerancePlugin restarts its ranks",
        "packager": "ranks on this machine run the code where it is",
    },
    "KubeflowExecutor": {
        "retries": "the runtime's failure policy decides whether pods start again",
        "restart_policy": "the runtime's failure policy decides whether pods start again",
        **dict.fromkeys(
            ("packager", "workdir_pvc", "workdir_pvc_path", "workdir_local_path", "data_mover_image"),
            "the image contains the code, and the pods' command the recipe",
        ),
    },
    "SkypilotExecutor": {"retries": _ONCE},
    "SkypilotJobsExecutor": {
        "retries": _ONCE,
        **dict.fromkeys(("cluster_name", "autodown", "idle_minutes_to_autostop", "retry_until_up"), _OWN_CLUSTER),
    },
    "DGXCloudExecutor": {"retries": _ONCE},
    "LeptonExecutor": {
        "retries": _ONCE,
        "custom_spec": "nemo-run doesn't pass it on",
        "launched_from_cluster": "nemo-run copies the code in any case",
        **dict.fromkeys(("head_resource_shape", "ray_version"), _RAY),
    },
}
"""Fields that have no effect, each with its reason, by the executor's class."""
_MEET = "ranks meet at MASTER_ADDR and MASTER_PORT"
_FT_FILES = "the launcher's settings are options of its command"
_UNUSED_OF_LAUNCHERS: dict[str, dict[str, str]] = {
    "": {
        "nsys_gpu_metrics": "add --gpu-metrics-devices to nsys_extra_args",
        **dict.fromkeys(("cfg_path", "finished_flag_file", "job_results_file"), _FT_FILES),
    },
    "SlurmExecutor": {
        "nsys_folder": "recordings are in lives/N/nsys_profile of the job's folder",
        "nsys_filename": "recordings are named for their node and process",
        **dict.fromkeys(("rdzv_backend", "rdzv_id"), _MEET),
    },
    "DockerExecutor": {"rdzv_port": "the ranks of one node meet at a free port"},
    **dict.fromkeys(
        ("DGXCloudExecutor", "LeptonExecutor", "KubeflowExecutor"),
        dict.fromkeys(("rdzv_backend", "rdzv_id", "rdzv_port"), _MEET),
    ),
}
"""The same of a launcher's fields. "": on every executor."""
_UNUSED_OF_SLURMS_PACKAGER = {
    "symlink_from_remote_dir": "each job has its own code. Set code='none' and PYTHONPATH in a profile instead",
    "debug": "set its variables in env_vars, such as TORCH_DISTRIBUTED_DEBUG",
}
_REPLACED_PARTS: dict[str, dict[str, dict[str, str]]] = {
    "KubeflowExecutor": {
        "container_kwargs": {
            "numNodes": "trainer.num_nodes",
            "numProcPerNode": "trainer.devices",
            "image": "image",
            "env": "env_vars or env_list",
            "command": "",
            "args": "",
        },
        "pod_spec_overrides": {
            "volumes": "volumes",
            "containers": "volume_mounts",
            "tolerations": "tolerations",
            "affinity": "affinity",
            "imagePullSecrets": "image_pull_secrets",
        },
        "spec_kwargs": {"trainer": "", "runtimeRef": "runtime_ref", "podTemplateOverrides": "", "runtimePatches": ""},
    },
    "DockerExecutor": {
        "additional_kwargs": {
            **{name: name for name in ("runtime", "shm_size", "ulimits", "ipc_mode", "healthcheck", "privileged")},
            **{name: name for name in ("network", "volumes")},
            "image": "container_image",
            "environment": "env_vars",
            "device_requests": "num_gpus",
            **dict.fromkeys(("command", "name", "hostname", "working_dir", "labels"), ""),
            **dict.fromkeys(("detach", "remove", "restart_policy"), ""),
        },
    },
    "DGXCloudExecutor": {
        "custom_spec": {
            "image": "container_image",
            "environmentVariables": "env_vars",
            "storage": "pvcs",
            "compute": "gpus_per_node",
            "command": "",
            "distributedFramework": "distributed_framework",
            **dict.fromkeys(("minReplicas", "maxReplicas", "numWorkers"), "trainer.num_nodes"),
        },
    },
}
"""The parts of a job that a field with extra parts would replace, or that replace it, with the field for each. "": there is
none."""
_INSTEAD = ("device_requests", "compute")
"""Parts that say more than their field, in whose place they may stand."""


def check_fields(executor: Any) -> None:
    """Refuse fields of a wrong type or range or that contradict each other, variables that a process can't have, and launchers
    that nemo2 doesn't know. Writes variables that are numbers as text.

    Raises:
        ConfigError: with a line per field.
    """
    kind = type(executor).__name__
    launcher = executor.launcher
    for field in fields(executor):  # None for a list or dictionary is none
        if field.default_factory is not MISSING and getattr(executor, field.name) is None:
            setattr(executor, field.name, field.default_factory())
    problems = mistyped_fields(executor, kind) + mistyped_fields(launcher, f"{kind}.launcher")
    problems = problems or [
        *out_of_range(executor, kind, _COUNTS, others=False),
        *out_of_range(launcher, f"{kind}.launcher", _COUNTS, others=False),
    ]
    if not (launcher in (None, "torchrun", "ft") or type(launcher) in (Launcher, Torchrun, FaultTolerance)):
        without = "None (srun starts the ranks)" if kind == "SlurmExecutor" else "None (torchrun)"
        problems.append(
            f"{kind}.launcher={launcher!r}: must be 'torchrun', 'ft' (nvidia-resiliency-ext) or {without}, or one of "
            "nemo-run's Torchrun, FaultTolerance and Launcher."
        )
    if not problems:  # what follows reads the fields
        problems += [*_replaced_parts(executor), *_late_errors(executor)]
    if problems:
        raise ConfigError("\n".join(problems))
    executor.env_vars = text_variables(executor.env_vars or {})


def mistyped_fields(owner: Any, path: str) -> list[str]:
    """A sentence for each field of a dataclass whose value can't be of its type. A launcher by its name has no fields."""
    if not is_dataclass(owner):
        return []
    values = {one.name: getattr(owner, one.name) for one in fields(owner) if one.init and one.name != "launcher"}
    return [*mistyped(type(owner), values, of=path).values()]


def text_variables(variables: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables with numbers as text.

    Raises:
        ConfigError: with a line per variable that a process can't have.
    """
    if problems := [problem for name, value in variables.items() if (problem := _problem_of(name, value))]:
        raise ConfigError("\n".join(problems))
    return {name: str(value) for name, value in variables.items()}


def start_with_torchrun(executor: Any) -> None:
    """Give an executor without a launcher torchrun, except Slurm's, whose srun starts the ranks. nemo-run's other
    executors start one process without it. Settings of nsys stay."""
    launcher = executor.launcher
    if type(executor).__name__ != "SlurmExecutor" and (launcher is None or type(launcher) is Launcher):
        nsys = {} if launcher is None else {field.name: getattr(launcher, field.name) for field in fields(Launcher)}
        executor.launcher = Torchrun(**nsys)


def warn_of_unused_fields(executor: Any) -> None:
    """Report on stderr each setting of the executor, of its launcher and of its variables that has no effect."""
    kind, unused = type(executor).__name__, dict(_UNUSED.get(type(executor).__name__, {}))
    slurm = kind == "SlurmExecutor"
    if kind == "LeptonExecutor" and not (executor.can_be_preempted or executor.can_preempt):
        unused["queue_priority"] = "set can_be_preempted or can_preempt, too"
    if slurm and not executor.container_image:
        without = "there is no container_image"
        unused |= dict.fromkeys(("container_mounts", "container_env"), without)
    if slurm and executor.packager is not None:
        for name in _changed(executor.packager, _UNUSED_OF_SLURMS_PACKAGER):
            value, reason = getattr(executor.packager, name), _UNUSED_OF_SLURMS_PACKAGER[name]
            print_warning(f"SlurmExecutor.packager.{name}={value!r} has no effect: {reason}.")
    for name in _changed(executor, unused):
        print_warning(f"{kind}.{name}={getattr(executor, name)!r} has no effect: {unused[name]}.")
    if isinstance(launcher := executor.launcher, Launcher):
        reasons = {**_UNUSED_OF_LAUNCHERS[""], **_UNUSED_OF_LAUNCHERS.get(kind, {})}
        traced = () if launcher.nsys_profile else ("nsys_folder", "nsys_filename")  # of no interest without nsys
        for name in _changed(launcher, [name for name in reasons if name not in traced]):
            print_warning(f"{kind}.launcher.{name}={getattr(launcher, name)!r} has no effect: {reasons[name]}.")
    set_on_ranks = SET_ON_RANKS if slurm else (*SET_ON_RANKS, PORT)
    for name, value in executor.env_vars.items():
        if name in set_on_ranks:
            print_warning(f"env: {name}={value!r} has no effect: the launcher sets it on each rank.")
        elif kind == "DGXCloudExecutor":
            if value and shlex.quote(value) != value:
                shown = "***" if is_secret_name(name) else repr(value)
                print_warning(
                    f"env: {name}={shown} is changed by Bash, because nemo-run doesn't quote it. Set it in the image."
                )
        elif not is_secret_name(name) and _REFERENCE.search(value):
            lines = " or set it in setup_lines" if slurm else ""
            print_warning(
                f"env: {name}={value!r} reaches the ranks as it is, because no shell reads it. Write it out{lines}."
            )


def _replaced_parts(executor: Any) -> Iterator[str]:
    """A sentence for each extra part in the place of one that nemo2 or another field sets, such as all volumes."""
    kind = type(executor).__name__
    for field, parts in _REPLACED_PARTS.get(kind, {}).items():
        for part in parts.keys() & (getattr(executor, field) or {}).keys():
            if part not in _INSTEAD or getattr(executor, parts[part]):
                instead = f"Set {parts[part]} instead" if parts[part] else "Leave it out"
                yield f"{kind}.{field} would replace {part} of the job. {instead}."


def _late_errors(executor: Any) -> Iterator[str]:
    """A sentence for each setting with which nemo-run 0.11 or its engine fails only after the submission."""
    kind, launcher = type(executor).__name__, executor.launcher
    for name in _NEEDED.get(kind, ()):
        if not (value := getattr(executor, name)) or not value.strip():
            yield f"{kind}.{name}={value!r}: must be set, because no job can be made without it."
    if kind == "DockerExecutor":
        if executor.retries:
            yield (
                f"DockerExecutor.retries={executor.retries}: Docker refuses to restart a container that it removes at its "
                "end, as nemo-run has it do. Set retries=0. FaultTolerancePlugin restarts ranks."
            )
        for limit in executor.ulimits:
            if not _ULIMIT.match(limit):
                yield f"DockerExecutor.ulimits: {limit!r} must be NAME:SOFT or NAME:SOFT:HARD, such as 'memlock:-1:-1'."
    job_dir = (kind == "SlurmExecutor" and getattr(executor.tunnel, "job_dir", None)) or "/"
    if not job_dir.startswith("/"):
        yield f"tunnel.job_dir={job_dir!r}: must be an absolute path on a file system that all nodes share."
    for field, keys in _VOLUME_KEYS.get(kind, {}).items():
        for volume in getattr(executor, field):
            if missing := [key for key in keys if not (isinstance(volume, Mapping) and volume.get(key))]:
                yield f"{kind}.{field}: {volume!r} has no {' and no '.join(missing)}."
    if kind == "LeptonExecutor" and (launcher == "ft" or isinstance(launcher, FaultTolerance)):
        yield (
            "LeptonExecutor.launcher: nemo-run starts nvidia-resiliency-ext's launcher without the address of rank 0. Use "
            "'torchrun' (FaultTolerancePlugin(resiliency_ext=False))."
        )
    if kind in _LOSES_RECORDINGS and isinstance(launcher, Launcher) and launcher.nsys_profile:
        yield (
            f"{kind}.launcher: nsys would write its recordings into a folder that ends with the container. Leave out nsys "
            "(NsysPlugin). PytorchProfilerPlugin writes into the run directory."
        )


def _changed(owner: Any, names: typing.Iterable[str]) -> list[str]:
    """The fields among ``names`` whose values aren't their defaults."""
    by_name = {field.name: field for field in fields(owner)}
    return [name for name in names if name in by_name and getattr(owner, name) != _default(by_name[name])]


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _problem_of(name: Any, value: Any) -> str:
    """What is wrong with an environment variable. "": nothing."""
    if not isinstance(name, str) or not _NAME.match(name):
        return f"env: {name!r} is not a valid variable name. Use letters, digits and underscores."
    shown = "***" if is_secret_name(name) else repr(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"env: {name}={shown}: must be text or a number. Write it as the ranks read it, such as '1'."
    if "\0" in str(value):
        return f"env: {name}={shown}: a variable can't contain the character of number 0. Remove it."
    if name == PORT and not (str(value).isdecimal() and 0 < int(value) < 65536):
        return f"env: {name}={shown}: must be the number of a port, 1 to 65535."
    return ""
