# SPDX-License-Identifier: Apache-2.0
"""Reads cluster profiles in TOML from ``~/.config/nemo2/clusters.toml`` and a project's ``nemo2.toml``, which takes
precedence.

```toml
[clusters.mycluster]
kind = "slurm"                  # see KINDS
account = "research"            # all fields of nemo-run's executor, under nemo-run's names
partition = "batch"
time = "3-00:00:00"             # left out: the partition's limit
gpus_per_node = 8
starter = "torchrun"            # or "srun": a task per rank
container_image = "nvcr.io/nvidia/pytorch:25.06-py3"
setup_lines = "source /shared/venv/bin/activate"
env = { NCCL_DEBUG = "WARN" }
ssh = { host = "login", user = "me", identity = "~/.ssh/id_ed25519" }     # left out: sbatch is on this machine
job_dir = "/shared/me/jobs"     # required over ssh
python = "python3"              # this and the following: `nemo2.launch.slurm.settings.ClusterSettings`
runs = "/shared/me/runs"
code = "tree"
```
"""

import ast
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Optional

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean, safe_name
from nemo2.launch.slurm.settings import ClusterSettings, limit_seconds
from nemo2.launch.slurm.submission import nemo_run_home
from nemo2.launch.trusted_files import read_trusted

KINDS = {
    "local": "LocalExecutor",
    "slurm": "SlurmExecutor",
    "docker": "DockerExecutor",
    "kubeflow": "KubeflowExecutor",
    "skypilot": "SkypilotExecutor",
    "skypilot_jobs": "SkypilotJobsExecutor",
    "dgxcloud": "DGXCloudExecutor",
    "lepton": "LeptonExecutor",
}
"""Kinds of profiles, and nemo-run's executors for them."""
PROJECT_FILE = "nemo2.toml"
_TABLE = "clusters"
_STARTERS = {"torchrun": "torchrun", "srun": None}
_PROFILE_NAMES, _SLURM_PROFILE_NAMES = ("kind", "env"), ("starter", "ssh", "job_dir")
"""Fields of a profile that stand for several of the executor's."""
_SET_BY_US = (
    "experiment_id",
    "job_dir",
    "nodes",
    "num_nodes",
    "ntasks_per_node",
    "nprocs_per_node",
    "env_vars",
    "launcher",
    "tunnel",
    "packager",
)


class Profile(NamedTuple):
    """A profile as its file defines it."""

    name: str
    file: Path
    values: Mapping[str, Any]


def user_file() -> Path:
    """The file that ``nemo2 cluster add`` writes."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "nemo2" / "clusters.toml"


def project_file() -> Optional[Path]:
    """The nearest ``nemo2.toml`` in the working directory or above it."""
    here = Path.cwd()
    return next((file for folder in (here, *here.parents) if (file := folder / PROJECT_FILE).is_file()), None)


def profiles() -> dict[str, Profile]:
    """All profiles by name.

    Raises:
        ConfigError: a file is not TOML or not a list of profiles.
        SecurityError: a file is another user's, or everybody may write to it.
    """
    by_name: dict[str, Profile] = {}
    for file in (user_file(), project_file()):
        if file is None or not file.is_file():
            continue
        try:
            content = tomllib.loads(read_trusted(file, effect="its setup_lines run in jobs"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} can't be read: {error}.") from error
        for name in content.keys() - {_TABLE}:
            raise ConfigError(f"{file}: {name!r} belongs to no profile and would not be read. Write [{_TABLE}.{name}].")
        tables = content.get(_TABLE, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{file}: {_TABLE}={tables!r} must be tables, [{_TABLE}.NAME].")
        for name, values in tables.items():
            if not isinstance(values, dict):
                raise ConfigError(f"{file}: [{_TABLE}] {name}={values!r} must be a table, [{_TABLE}.{name}].")
            by_name[name] = Profile(safe_name(name, field=f"{file}: [{_TABLE}]"), file, values)
    return by_name


def resolve_executor(executor: Any) -> tuple[Any, Optional[ClusterSettings]]:
    """The executor of a name, and its settings. A value that is not a name is returned unchanged, without settings.

    A name is "local", a profile, or a function in nemo-run's ``executors.py``.

    Raises:
        ConfigError: the name is unknown or its profile is wrong.
        SecurityError: a file of configuration is not to be trusted (`nemo2.launch.trusted_files`).
    """
    if executor is None or executor == "local" or not isinstance(executor, str):
        return executor, None
    known = profiles()
    if executor in known:
        return build_executor(known[executor])
    file = nemo_run_home() / "executors.py"
    functions: list[str] = []
    if file.is_file():
        source = ast.parse(read_trusted(file, effect="its functions run in this process"))
        functions = [node.name for node in source.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        if executor in functions:
            import nemo_run

            return nemo_run.import_executor(executor, str(file)), None
    raise ConfigError(
        f"{advice(f'--executor {executor}', f'executor={executor!r}')}: there is neither a profile of this name in "
        f"{user_file()} or {PROJECT_FILE} (`nemo2 cluster add {executor}` writes one) nor a function in "
        f"{file}{did_you_mean(executor, ['local', *known, *functions])}"
    )


def build_executor(profile: Profile) -> tuple[Any, ClusterSettings]:
    """nemo-run's executor for a profile, and the profile's settings that the executor doesn't have.

    Raises:
        ConfigError: the message names the file, the field and its valid values.
    """
    where = f"{profile.file}: [{_TABLE}.{profile.name}]"
    if profile.name == "local":
        raise ConfigError(f"{where} is never read, because the executor 'local' is this machine. Use another name.")
    kind = profile.values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"{where} {'has no kind' if kind is None else f'kind={kind!r}'}{did_you_mean(str(kind), KINDS)}"
        )
    import nemo_run  # takes seconds, which a mistake above doesn't wait for

    from nemo2.launch.executor_fields import check_fields

    executor_class: Any = getattr(nemo_run, KINDS[kind])
    profile_names = {*_PROFILE_NAMES, *(_SLURM_PROFILE_NAMES if kind == "slurm" else ())}
    setting_names = {field.name for field in fields(ClusterSettings)} if kind == "slurm" else {"gpu"}
    executor_names = {field.name for field in fields(executor_class) if field.init} - {*_SET_BY_US, *profile_names}
    known = {*profile_names, *setting_names, *executor_names}
    for key in profile.values:
        if key not in known:
            raise ConfigError(f"{where} {key!r} is not a field of kind {kind!r}{did_you_mean(key, sorted(known))}")
    values = {key: value for key, value in profile.values.items() if key in executor_names}
    variables = profile.values.get("env", {})
    if not isinstance(variables, dict):
        raise ConfigError(f'{where} env={variables!r}: must be a table, {{ NAME = "value" }}.')
    values["env_vars"] = variables
    if kind == "slurm":
        values = {"account": "", **values, **_slurm_fields(profile, where)}
        values["time"] = str(values.get("time", ""))  # TOML reads 30 as a number and 04:00:00 as a time of day
    else:
        values.setdefault("launcher", "torchrun")
    try:
        if kind == "slurm":
            limit_seconds(values["time"])
        executor = executor_class(**values)
        check_fields(executor)
        settings = ClusterSettings(**{key: value for key, value in profile.values.items() if key in setting_names})
    except ConfigError as error:
        text = str(error).replace("tunnel.job_dir", "job_dir")  # its name in a profile
        raise ConfigError(f"{where} {text}") from error
    except (TypeError, ValueError, AssertionError, ImportError) as error:
        raise ConfigError(f"{where} {KINDS[kind]} refuses it: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ConfigException":  # kubernetes', which few have installed
            raise
        raise ConfigError(f"{where} no Kubernetes cluster is configured: {error} Set KUBECONFIG.") from error
    return executor, settings


def _slurm_fields(profile: Profile, where: str) -> dict[str, Any]:
    starter = profile.values.get("starter", "torchrun")
    if starter not in _STARTERS:
        raise ConfigError(f"{where} starter={starter!r}: must be 'torchrun' or 'srun'.")
    job_dir, ssh = profile.values.get("job_dir", ""), profile.values.get("ssh")
    import nemo_run

    if ssh is None:
        return {"launcher": _STARTERS[starter], "tunnel": nemo_run.LocalTunnel(job_dir=job_dir)}
    if not isinstance(ssh, dict) or not {"host", "user"} <= ssh.keys() <= {"host", "user", "port", "identity"}:
        raise ConfigError(f"{where} ssh={ssh!r}: must be a table with host and user, and may have port and identity.")
    if not job_dir:
        raise ConfigError(f"{where} job_dir is missing. For ssh, set a directory that all nodes share.")
    identity = ssh.get("identity")
    ssh = {**ssh, **({"identity": str(Path(identity).expanduser())} if identity else {})}
    return {"launcher": _STARTERS[starter], "tunnel": nemo_run.SSHTunnel(job_dir=job_dir, **ssh)}
