# SPDX-License-Identifier: Apache-2.0
"""``nemo2 cluster``: adds, shows and tests profiles of clusters."""

import json
import os
import re
from typing import Annotated, Any, Optional

import typer

from nemo2.base.columns import columns
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.base.files import append
from nemo2.base.names import did_you_mean, safe_name
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.commands import as_json
from nemo2.launch.clusters import Profile, build_executor, profiles, user_file

Name = Annotated[str, typer.Argument(help="Name of the profile.")]


def add(
    name: Name,
    settings: Annotated[Optional[list[str]], typer.Argument(metavar="KEY=VALUE...")] = None,
) -> Result:
    """Add a profile to ~/.config/nemo2/clusters.toml. Fails if the name exists.

    Args:
        settings: Fields of the profile; values are TOML or text.

    Example: nemo2 cluster add mycluster kind=slurm partition=batch job_dir=/shared/me/jobs
    """
    safe_name(name, field="cluster")
    if name in profiles():
        raise ConfigError(f"{name} already exists in {profiles()[name].file}: edit it, or use another name.")
    values: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key, re.ASCII):
            raise ConfigError(f"{setting!r}: must be KEY=VALUE, for example partition=batch or ssh.host=login.")
        *tables, last = key.split(".")
        table: Any = values
        for part in tables:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise ConfigError(
                f"{setting!r}: another setting says that {'.'.join(tables)} is a value. Remove one of them."
            )
        table[last] = _value(text)
    file = user_file()
    build_executor(Profile(name, file, values))
    text = f"\n[clusters.{json.dumps(name, ensure_ascii=False)}]\n"
    text += "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())
    if _parsed(text) != {"clusters": {name: values}}:  # the file has all profiles: every command reads it
        raise ConfigError(f"{name}: nemo2 can't write one of its values as TOML. Add the profile to {file} yourself.")
    file.parent.mkdir(parents=True, exist_ok=True)
    append(file, text, opener=lambda name, flags: os.open(name, flags, 0o600))
    text = f"{name}: written to {file}; test it with `nemo2 cluster test {name}`"
    return Result({"name": name, "file": str(file)}, text)


def list_clusters() -> Result:
    """List all profiles.

    Example: nemo2 cluster list
    """
    by_name = profiles()
    data = [{"name": one.name, "kind": one.values.get("kind"), "file": str(one.file)} for one in by_name.values()]
    none = f"no profiles; add one with `nemo2 cluster add NAME kind=slurm ...`, which writes to {user_file()}"
    rows = [[str(value) for value in one.values()] for one in data]
    return Result(data, "\n".join(columns(rows, head=["name", "kind", "file"])) if rows else none)


def show_cluster(
    name: Name,
) -> Result:
    """Print a profile and the executor that it creates. Hides values that look like secrets.

    Example: nemo2 cluster show mycluster
    """
    profile = _profile(name)
    values = {key: _without_secrets(value) if key == "env" else value for key, value in profile.values.items()}
    kind = type(build_executor(profile)[0]).__name__
    data = {"name": name, "file": str(profile.file), "executor": f"nemo_run.{kind}", "values": values}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    head = [f"# {profile.file}", f"[clusters.{json.dumps(name)}]"]
    return Result(data, "\n".join([*head, *lines, f"# creates a nemo_run.{kind}"]))


def test(
    name: Name,
    *,
    nodes: Annotated[int, AT_LEAST_1] = 2,
    wait: Annotated[float, AT_LEAST_1] = 600.0,
) -> Result:
    """Run a job of a few seconds on the cluster, and report problems.

    Args:
        nodes: Nodes of the test job, which all-reduces a number over them.
        wait: Maximum seconds that the job waits in the queue.

    Example: nemo2 cluster test mycluster --nodes 2
    """
    from nemo2.launch.slurm.probing import test_cluster

    executor, settings = build_executor(_profile(name))
    findings: list[dict[str, Any]] = []
    for finding in test_cluster(executor, settings, nodes=nodes, wait_seconds=wait):
        findings.append(finding._asdict())
        if not as_json():
            print(f"{'error' if finding.stops else 'note'}: {finding.message}", flush=True)
    stops = any(one["stops"] for one in findings)
    works = f"the all-reduce over {counted(nodes, 'node')} is correct. Runs can start."
    text = f"{name}: {'runs will fail. Fix the errors above.' if stops else works}"
    return Result({"name": name, "nodes": nodes, "works": not stops, "findings": findings}, text, int(stops))


def _profile(name: str) -> Any:
    by_name = profiles()
    if name not in by_name:
        raise ConfigError(
            f"There is no cluster profile {name!r}{did_you_mean(name, by_name)} Run `nemo2 cluster list` for all profiles, or "
            f"`nemo2 cluster add {name}` to make one."
        )
    return by_name[name]


def _without_secrets(variables: Any) -> Any:
    from nemo2.launch.local import split_secrets

    return {**variables, **dict.fromkeys(split_secrets(variables)[1], "***")}


def _value(text: str) -> Any:
    """A value in TOML's notation: number, boolean, list or table. Anything else is text, including TOML's times of
    day."""
    parsed = _parsed(f"value = {text}")
    is_value = len(parsed) == 1 and isinstance(parsed["value"], bool | int | float | str | list | dict)
    return parsed["value"] if is_value else text


def _parsed(text: str) -> dict[str, Any]:
    """A text of TOML. Empty: it is none."""
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, default=str, ensure_ascii=False)
