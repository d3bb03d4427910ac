# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of nemo-run's executors before a launch reads them, and reports those that have no effect.

nemo-run 0.11 checks none of them: a text in place of a list becomes a list of letters, a wrong launcher is a KeyError,
and a rank of a launch without torchrun waits for ranks that nothing starts.
"""

import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from nemo_run.core.execution.launcher import FaultTolerance, Launcher, Torchrun

from nemo2.base.errors import ConfigError
from nemo2.base.place import PORT, SET_ON_RANKS
from nemo2.config.value_types import misfits, type_hints
from nemo2.training.run_dir.environment import is_secret_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_REFERENCE = re.compile(r"\$\{?[A-Za-z_]")
_PLAIN = {str: "text", dict: "a dictionary"}
_GROUPS = "nemo2 starts one task of srun"
_UNUSED: dict[str, dict[str, str]] = {
    "SlurmExecutor": {
        "open_mode": "the job's output is always appended to, because all starts of a job are read from it",
        "memory_measure": "nemo2 doesn't start nemo-run's measurement",
        "dependency_type": "set additional_parameters={'dependency': 'afterok:123'} instead",
        "job_details": "the job's folder has a fixed layout. Set tunnel.job_dir and job_name_prefix instead",
        "ray_template": "nemo2 starts no Ray cluster",
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
}
"""Fields that nemo2 doesn't use, each with its reason, by the executor's class."""
_UNUSED_BY_SLURM = {
    "nsys_folder": "recordings are in lives/N/nsys_profile of the job's folder",
    "nsys_filename": "recordings are named for their node and process",
    "nsys_gpu_metrics": "add --gpu-metrics-devices to nsys_extra_args",
    "rdzv_backend": "ranks meet at MASTER_ADDR and MASTER_PORT",
    "rdzv_id": "ranks meet at MASTER_ADDR and MASTER_PORT",
}
"""The same of a launcher's fields on Slurm."""


def check_fields(executor: Any) -> None:
    """Refuse fields of a wrong type, variables that a process can't have, and launchers that nemo2 doesn't know.
    Writes variables that are numbers as text.

    Raises:
        ConfigError: with a line per field.
    """
    kind = type(executor).__name__
    values = {one.name: getattr(executor, one.name) for one in fields(executor) if one.init and one.name != "launcher"}
    hints = type_hints(type(executor))
    mistyped = list(misfits(type(executor), values))
    for name, value in values.items():
        if (plain := _other(hints[name], value)) is not None:
            mistyped.append((name, value, _PLAIN[plain]))
    problems = [
        f"{kind}.{name}={value!r}: must be {wanted}, not {type(value).__name__}." for name, value, wanted in mistyped
    ]
    launcher = executor.launcher
    if not (launcher in (None, "torchrun", "ft") or type(launcher) in (Launcher, Torchrun, FaultTolerance)):
        without = "None (srun starts the ranks)" if kind == "SlurmExecutor" else "None (torchrun)"
        problems.append(
            f"{kind}.launcher={launcher!r}: must be 'torchrun', 'ft' (nvidia-resiliency-ext) or {without}, or one of "
            "nemo-run's Torchrun, FaultTolerance and Launcher."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    executor.env_vars = text_variables(executor.env_vars or {})


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
        nsys = {} if launcher is None else {one.name: getattr(launcher, one.name) for one in fields(Launcher)}
        executor.launcher = Torchrun(**nsys)


def warn_of_unused_fields(executor: Any) -> None:
    """Report on stderr each setting of the executor, of its launcher and of its variables that has no effect."""
    kind, unused = type(executor).__name__, dict(_UNUSED.get(type(executor).__name__, {}))
    slurm = kind == "SlurmExecutor"
    if slurm and not executor.container_image:
        without = "there is no container_image"
        unused |= dict.fromkeys(("container_mounts", "container_env"), without)
    for name in _changed(executor, unused):
        _warn(f"{kind}.{name}={getattr(executor, name)!r} has no effect: {unused[name]}")
    if slurm and isinstance(launcher := executor.launcher, Launcher):
        traced = () if launcher.nsys_profile else ("nsys_folder", "nsys_filename")  # of no interest without nsys
        for name in _changed(launcher, [name for name in _UNUSED_BY_SLURM if name not in traced]):
            reason = _UNUSED_BY_SLURM[name]
            _warn(f"{kind}.launcher.{name}={getattr(launcher, name)!r} has no effect: {reason}")
    set_on_ranks = SET_ON_RANKS if slurm else (*SET_ON_RANKS, PORT)
    for name, value in executor.env_vars.items():
        if name in set_on_ranks:
            _warn(f"env: {name}={value!r} has no effect: the launcher sets it on each rank")
        elif not is_secret_name(name) and _REFERENCE.search(value):
            lines = " or set it in setup_lines" if slurm else ""
            _warn(f"env: {name}={value!r} reaches the ranks as it is, because no shell reads it. Write it out{lines}")


def _changed(owner: Any, names: typing.Iterable[str]) -> list[str]:
    """The fields among ``names`` whose values aren't their defaults."""
    by_name = {one.name: one for one in fields(owner)}
    return [name for name in names if name in by_name and getattr(owner, name) != _default(by_name[name])]


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _other(hint: Any, value: Any) -> Any:
    """The type that the annotation takes, if that is text or a dictionary and the value is certainly neither."""
    choices = [one for one in typing.get_args(hint) or (hint,) if one is not type(None)]
    plain = {typing.get_origin(one) or one for one in (choices if typing.get_origin(hint) is typing.Union else [hint])}
    if plain == {str} and isinstance(value, list | tuple | set | dict):
        return str
    return dict if plain == {dict} and not (value is None or isinstance(value, Mapping)) else None


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


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}.", file=sys.stderr)
