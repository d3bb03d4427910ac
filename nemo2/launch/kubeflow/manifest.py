# SPDX-License-Identifier: Apache-2.0
"""The TrainJob of a run: a manifest for ``kubectl create -f``.

Fields and their names are those of nemo-run's ``KubeflowExecutor``, whose `get_job_body` makes the first version of the
manifest. nemo-run 0.11's own manifest of a recipe does not run: the ranks' command names a file of the submitting
machine, and variables are unquoted in a script. Here the command itself contains the recipe (`pod`), so that the image
needs only nemo2.

The place of volumes, tolerations and similar fields depends on the version of Kubeflow Trainer:

| Trainer | field of the TrainJob |
|---|---|
| before 2.2 | ``spec.podTemplateOverrides``, which nemo-run 0.11 writes |
| from 2.2 | ``spec.runtimePatches`` (https://github.com/kubeflow/trainer/pull/3309) |

A server drops unknown fields, including volumes, unless the request asks for an error, which `run` does.
"""

import copy
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Optional

import fiddle
from fiddle import daglish
from nemo_run.core.execution.launcher import Torchrun

from nemo2.base.errors import ConfigError
from nemo2.base.import_path import own_folders
from nemo2.base.names import safe_name
from nemo2.launch.kubeflow.pod import RANK_FILES
from nemo2.launch.rank_files import rank_files

Form = Literal["runtimePatches", "podTemplateOverrides"]

MANAGER = "nemo2/launch"
"""The owner of the runtime's patch. Trainer separates the patches of different owners."""
GRACE_SECONDS = 600
"""The time that a terminating pod has to save. Kubernetes' default is 30 seconds."""
_MOST_BYTES = 120 * 1024
"""The longest argument. Linux allows 128 KiB."""
_SHARED_MEMORY = {"name": "nemo2-shared-memory", "emptyDir": {"medium": "Memory"}}


def train_job(
    recipe: Any, executor: Any, *, name: str, variables: Mapping[str, str], form: Form = "runtimePatches"
) -> dict[str, Any]:
    """The manifest of a run as plain values.

    Args:
        executor: a ``KubeflowExecutor`` with its shape; it is not changed.
        name: The name of the TrainJob, from `job_name`.
        variables: The variables of all ranks.

    Raises:
        ConfigError: the recipe writes to no volume, or is too long for a command.
    """
    if not executor.image:
        raise ConfigError('KubeflowExecutor.image="": name an image that has nemo2, image = "registry/nemo2:1".')
    _refuse_lost_files(recipe, executor)
    _refuse_other_launchers(executor)
    executor = copy.copy(executor)
    executor.env_vars = {key: str(value) for key, value in variables.items()}
    executor.volumes, executor.volume_mounts = list(executor.volumes), list(executor.volume_mounts)
    if not any(mount.get("mountPath") == "/dev/shm" for mount in executor.volume_mounts):
        # By default a container has 64 MiB of shared memory, which NCCL's ranks of one node and data loaders use.
        executor.volumes.append(_SHARED_MEMORY)
        executor.volume_mounts.append({"name": _SHARED_MEMORY["name"], "mountPath": "/dev/shm"})
    executor.pod_spec_overrides = {"terminationGracePeriodSeconds": GRACE_SECONDS, **executor.pod_spec_overrides}
    files = rank_files(recipe)
    arguments = [files.get(name, "") for name in RANK_FILES]
    for what, argument in zip(("recipe", "recipe", "launching script"), arguments, strict=True):
        if len(argument.encode()) > _MOST_BYTES:
            raise ConfigError(
                f"The {what} has {len(argument.encode()) // 1024} KiB, but a pod's command can have only "
                f"{_MOST_BYTES // 1024}. Put long lists into files in the image or on a volume, and name the file in "
                "the recipe."
            )
    body = executor.get_job_body(name, ["python3", "-m", "nemo2.launch.kubeflow.pod", *arguments])
    if form == "runtimePatches":
        body["spec"]["runtimePatches"] = [_patch(one) for one in body["spec"].pop("podTemplateOverrides", [])]
    return body


def job_name(name: str, experiment_id: str) -> str:
    """A new name for each launch that Kubernetes accepts: lower case, digits and hyphens, at most 33 characters,
    because names of pods extend it."""
    ending = experiment_id.rpartition("_")[2][-10:]
    plain = re.sub(r"[^a-z0-9-]+", "-", safe_name(name).lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: 32 - len(ending)].strip('-')}-{ending}"


def own_modules(recipe: Any) -> list[str]:
    """Modules that the recipe names and that are in the user's own folders. The image must contain them."""
    named = {
        getattr(fiddle.get_callable(value), "__module__", None)
        for value, _ in daglish.iterate(recipe)
        if isinstance(value, fiddle.Buildable)
    }
    folders = [str(Path(folder).resolve()) for folder in own_folders()]
    packages = (Path(__file__).parents[3].resolve(), Path(sys.prefix).resolve())
    own: list[str] = []
    for module in sorted(one for one in named if one and one != "__main__"):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or any(package in Path(file).resolve().parents for package in packages):
            continue
        if any(str(Path(file).resolve()).startswith(f"{folder}/") for folder in folders):
            own.append(module)
    return own


def _patch(override: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of ``podTemplateOverrides`` in the form of ``runtimePatches``."""
    pod = {key: override[key] for key in ("metadata", "spec") if key in override}
    jobs = [{"name": job["name"], "template": {"spec": {"template": pod}}} for job in override["targetJobs"]]
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def _refuse_other_launchers(executor: Any) -> None:
    """Refuse launchers other than torchrun.

    Raises:
        ConfigError: the executor has another, or nsys.
    """
    launcher = executor.get_launcher()
    if not isinstance(launcher, Torchrun) or launcher.nsys_profile:
        raise ConfigError(
            f"KubeflowExecutor.launcher={launcher!r}: pods start their ranks by torchrun, without nsys. Leave out the "
            "launcher, and NsysPlugin and the extension of FaultTolerancePlugin (resiliency_ext=False)."
        )


def _refuse_lost_files(recipe: Any, executor: Any) -> None:
    log = getattr(recipe, "log", None)
    if log is None:
        return
    explicit = getattr(log, "explicit_log_dir", None)
    field = "log.explicit_log_dir" if explicit else "log.log_dir"
    directory: Optional[str] = explicit or getattr(log, "log_dir", None)
    mounts = [mount["mountPath"].rstrip("/") for mount in executor.volume_mounts if "mountPath" in mount]
    if directory and directory.startswith("/"):
        inside = any(directory == mount or directory.startswith(f"{mount}/") for mount in mounts)
        # Without its own mounts, the runtime may provide them. Only the cluster's administrator knows.
        if inside or not mounts:
            return
    there = f" (mounted: {', '.join(mounts)})" if mounts else ""
    raise ConfigError(
        f"{field}={directory!r} is not on a volume of the pods{there}, so its files are lost when the pods end. Set "
        f"{field}={mounts[0] if mounts else '/VOLUME'}/runs."
    )
