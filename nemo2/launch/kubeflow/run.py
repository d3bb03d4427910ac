# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe on Kubernetes, from its manifest to its end.

Submission, states and logs use the API clients and the kubeconfig of nemo-run's ``KubeflowExecutor``. ``kubectl`` is
not needed.
"""

import contextlib
import copy
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Optional

import fiddle
import yaml
from fiddle import daglish
from nemo_run.core.execution.launcher import Torchrun

from nemo2.base.errors import EXIT_PREEMPTED, ConfigError, Preempted
from nemo2.base.import_path import own_folders
from nemo2.base.names import safe_name
from nemo2.launch.failure import RankFailure
from nemo2.launch.kubeflow.pod import RANK_FILES, read_termination_message
from nemo2.launch.local import split_secrets
from nemo2.launch.rank_files import rank_files
from nemo2.launch.request import LaunchRequest
from nemo2.launch.result import RunResult
from nemo2.launch.stream import without_rank
from nemo2.training.run_dir.directory import VERSION_VARIABLE, timestamp
from nemo2.training.run_dir.faults import reports_another_rank

_KIND = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs"}
_JOB_LABEL, _NUMBER_LABEL = "jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-completion-index"
_PAUSE_SECONDS = 2.0


def on_kubeflow(request: LaunchRequest) -> RunResult:
    """Submit a recipe as a TrainJob and follow it, or print its manifest with the reasons of its settings. Ctrl-C leaves the
    job running.

    Raises:
        ConfigError: the cluster rejects the job, or can't be reached.
    """
    recipe, executor = request.recipe, request.executor
    variables, secrets = split_secrets({VERSION_VARIABLE: timestamp(), **executor.env_vars})
    if secrets:
        print(
            f"warning: {', '.join(sorted(secrets))} would be readable in the manifest, so nemo2 leaves it out. Use a secret "
            "of the cluster: env_list = [{ name = ..., valueFrom = { secretKeyRef = { name = ..., key = ... } } }].",
            file=sys.stderr,
        )
    if modules := own_modules(recipe):
        print(
            f"warning: {', '.join(modules)}: the recipe uses code of this machine. Make sure that the image contains it.",
            file=sys.stderr,
        )
    job = job_name(executor.train_job_basename or request.name, request.experiment_id)

    def body(form: Form) -> dict[str, Any]:
        return train_job(recipe, executor, name=job, variables=variables, form=form)

    if request.dryrun:
        print(yaml.safe_dump(body("runtimePatches"), sort_keys=False, width=10**6), end="")
        if request.reasons:
            print("\n".join(["", "# because", *(f"#   {line}" for line in request.reasons)]))
        return request.result("dryrun")
    started = time.monotonic()
    _create(executor, body)
    where = f"-n {executor.namespace}"
    print(f"submitted as TrainJob {job} in {executor.namespace}: kubectl get trainjob {job} {where}", flush=True)
    if request.detach:
        return request.result("submitted", jobs=(job,))
    try:
        state = follow(executor, job)
    except KeyboardInterrupt:
        print(f"\nThe run continues. `kubectl delete trainjob {job} {where}` saves and ends it.", file=sys.stderr)
        raise
    facts: dict[str, Any] = {"jobs": (job,), "seconds": time.monotonic() - started}
    if state == "Succeeded":
        return request.result("succeeded", **facts)
    words = first_error(executor, job)
    error = "no pod has written output" if words is None else f"{words['kind']}: {words['message']}".removeprefix(": ")
    rank = None if words is None else words["rank"]
    who = "the job failed" if rank is None else f"rank {rank} failed first"
    code = EXIT_PREEMPTED if words is not None and words["kind"] == Preempted.__name__ else 1
    message = f"{who}: {error.rstrip('.')}. Logs: kubectl logs -l {_JOB_LABEL}={job} {where} --prefix"
    failure = RankFailure(message, rank=rank, exit_code=code, details="", log_dir=Path())
    return request.result("failed" if state == "Failed" else "cancelled", code, failure=failure, **facts)


def follow(executor: Any, job: str) -> str:
    """Print the output of rank 0 of ``job`` until the job ends. Returns "Succeeded", "Failed", or "" for a deleted
    job."""
    shown: set[tuple[str, int]] = set()
    while True:
        state = executor.status(job)
        pod = _first_pod(executor, job)
        if pod is not None and pod not in shown and _show(executor, pod[0]):
            shown.add(pod)
            continue
        if state is None or state.value in ("Succeeded", "Failed"):
            return "" if state is None else state.value
        time.sleep(_PAUSE_SECONDS)


def first_error(executor: Any, job: str) -> Optional[dict[str, Any]]:
    """The earliest error in the termination messages of the pods of ``job``. None: there is none."""
    messages: list[dict[str, Any]] = []
    for pod in _pods(executor, job):
        for container in pod.status.container_statuses or []:
            for state in (container.state, container.last_state):
                ended = state.terminated if state is not None else None
                if ended is not None and (words := read_termination_message(ended.message)):
                    messages.append(words)
    # A message without a rank has only torchrun's exit code, which follows from an error elsewhere.
    return min(
        messages,
        key=lambda words: (words["rank"] is None, reports_another_rank(words["message"]), words["time"]),
        default=None,
    )


def _create(executor: Any, body: Any) -> None:
    """Create the TrainJob, in the form that the cluster's version of Trainer supports."""
    from kubernetes.client.rest import ApiException

    refusal = ""
    forms: tuple[Form, ...] = ("runtimePatches", "podTemplateOverrides")
    for form in forms:
        try:
            # With this option a server rejects a field that it would otherwise drop, together with the run's volumes.
            executor._custom_objects_api.create_namespaced_custom_object(
                **_KIND, namespace=executor.namespace, body=body(form), field_validation="Strict"
            )
            return
        except ApiException as error:
            refusal = _reason(error)
            if form not in refusal:
                break
        except Exception as error:  # among them urllib3's, which kubernetes passes on
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "urllib3":
                raise
            raise ConfigError(
                f"The cluster cannot be reached: {error}. Check the current context of the kubeconfig."
            ) from error
    raise ConfigError(f"The cluster rejects the TrainJob: {refusal}")


def _reason(error: Any) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(yaml.safe_load(error.body)["message"])
    return f"{error.status} {error.reason}"


def _pods(executor: Any, job: str) -> list[Any]:
    selector = f"{_JOB_LABEL}={job}"
    return executor._core_v1_api.list_namespaced_pod(namespace=executor.namespace, label_selector=selector).items


def _first_pod(executor: Any, job: str) -> Optional[tuple[str, int]]:
    """The name of the pod with rank 0, and the number of its restarts. None: it doesn't run yet."""
    for pod in _pods(executor, job):
        if (pod.metadata.labels or {}).get(_NUMBER_LABEL) == "0" and pod.status.phase not in (None, "Pending"):
            restarts = sum(container.restart_count or 0 for container in pod.status.container_statuses or [])
            return pod.metadata.name, restarts
    return None


def _show(executor: Any, pod: str) -> bool:
    """Print a pod's output as it arrives, of its first rank only. Returns False if there is no output yet."""
    from kubernetes.client.rest import ApiException

    try:
        response = executor._core_v1_api.read_namespaced_pod_log(
            pod, executor.namespace, follow=True, _preload_content=False
        )
    except ApiException:
        return False
    rest = b""
    for chunk in response.stream():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            rank, text = without_rank(line.decode(errors="replace"))
            if rank in (0, None):
                print(text, flush=True)
    return True


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
