# SPDX-License-Identifier: Apache-2.0
"""Lists who sets a rank's variables, in order: the launcher, this shell, the executor or its profile, each plugin.
The last value wins."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import nemo_run

from nemo2.launch.environment import launch_variables, ranks_on
from nemo2.launch.local import split_secrets
from nemo2.launch.shape import give_shape
from nemo2.settle.machine import Machine


class Given(NamedTuple):
    """A value and who set it."""

    value: str
    who: str


def given_variables(
    recipe: Any,
    executor: Any,
    machine: Machine,
    *,
    plugins: Sequence[Any] = (),
    devices: int,
    nodes: int,
    profile: str = "",
) -> dict[str, list[Given]]:
    """The values of each variable, in rising precedence. Plugins edit ``recipe`` and ``executor``, so pass copies.

    Args:
        executor: None: torchrun on this machine.
        profile: The executor's name, for messages.

    Raises:
        ConfigError: a plugin rejects the run, or the executor can't have this shape.
    """
    executor = executor or nemo_run.LocalExecutor(launcher="torchrun")
    give_shape(executor, devices=devices, nodes=nodes)
    theirs: list[tuple[str, dict[str, str]]] = [(profile or type(executor).__name__, dict(executor.env_vars))]
    for plugin in plugins:
        before = dict(executor.env_vars)
        plugin.setup(recipe, executor)
        changed = {name: value for name, value in executor.env_vars.items() if before.get(name) != value}
        theirs.append((type(plugin).__name__, changed))
    found: dict[str, list[Given]] = {}
    ranks = ranks_on(machine, recipe, devices=devices, nodes=nodes)
    for name, variable in (launch_variables(ranks) if ranks else {}).items():
        found[name] = [Given(variable.value, f"the launcher: {variable.why}")]
        if machine.local and name in os.environ:
            found[name].append(Given(os.environ[name], "this shell"))
    for who, variables in theirs:
        for name, value in variables.items():
            shown = "***" if name in split_secrets(variables)[1] else value
            found.setdefault(name, []).append(Given(shown, who))
    return found


def lines(found: dict[str, list[Given]]) -> list[str]:
    """A paragraph per variable: the value that the ranks receive, and the overridden values with their sources."""
    told = []
    for name in sorted(found):
        *others, last = found[name]
        told.append(f"{name}={last.value}  ({last.who})")
        told += [f"    before that {one.value}  ({one.who})" for one in reversed(others) if one.value != last.value]
    return told
