# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show --explain``: the value of a setting in a run, and the reason for the value."""

from typing import Any, Optional

from nemo2.base.counts import counted
from nemo2.cli.adapter import Result
from nemo2.cli.commands import not_with
from nemo2.cli.flags import machine_of
from nemo2.mcore.settle.machine import Machine

ENVIRONMENT, ALL = "environment", "all"
"""Words in place of a field: the environment variables of the ranks; every setting that differs from its default."""


def reasons(recipe: Any, gpus: Optional[str], field: str, executor: Optional[str], plugins: list[str]) -> Result:
    """Every value that ``field`` had on its way into the run. `ALL`: the final value of each setting that differs from its
    default. `ENVIRONMENT`, which alone depends on ``executor`` and ``plugins``: the ranks' variables."""
    if field == ENVIRONMENT:
        return _variables(recipe, gpus, executor, plugins)
    not_with("explain", "executor", "plugins")
    from nemo2.mcore.settle.settling import settle
    from nemo2.preflight.explain.fields import explain, explain_all

    effective = settle(recipe, Machine.here() if gpus is None else machine_of(gpus))
    settings = explain_all(recipe, effective) if field == ALL else explain(recipe, effective, field)
    size = effective.world.size if effective.world else effective.layout.model_parallel_size
    text = "\n".join(setting.line() for setting in settings) if field == ALL else "\n\n".join(map(str, settings))
    how = "" if field == ALL else "; the last line of each setting is the value in the run"
    text += f"\n\nOn {counted(size, 'rank')} of {effective.machine.describe()}, {effective.layout.describe()}{how}."
    refused = "".join(f"\n\nThe run would stop with an error: {refusal}" for refusal in effective.messages)
    return Result(_as_data(settings, effective, size), text + refused)


def _as_data(settings: list[Any], effective: Any, size: int) -> dict[str, Any]:
    from nemo2.config.show import plain

    def layers(one: Any) -> list[dict[str, Any]]:
        return [{"value": plain(layer.value), "who": layer.who, "requested": layer.requested} for layer in one.layers]

    return {
        "settings": [{"path": one.path, "value": plain(one.effective), "layers": layers(one)} for one in settings],
        "machine": effective.machine.describe(),
        "ranks": size,
        "layout": effective.layout.describe(),
        "refused": list(effective.messages),
    }


def _variables(recipe: Any, gpus: Optional[str], executor: Optional[str], plugins: list[str]) -> Result:
    """The environment variables that nemo2 sets for the ranks, and why."""
    from nemo2.launch.environment import origin_lines, variable_origins
    from nemo2.launch.launcher import apply_shape, place_of
    from nemo2.launch.plugins.apply import build_plugins, split_plugins

    base, _, machine = place_of(executor, None)
    machine = machine_of(gpus) if gpus else machine
    devices, nodes, _ = apply_shape(recipe, machine, devices=None, nodes=None, name=None)
    origins = variable_origins(
        recipe,
        None if base in (None, "local") else base.clone(),
        machine,
        plugins=build_plugins(split_plugins(plugins)),
        devices=devices,
        nodes=nodes,
        profile=executor or "",
    )
    where = f"{counted(nodes, 'node')} x {machine.counted(devices)}"
    text = "\n".join([*origin_lines(origins), f"\nOn {where}; the first line of each is the value that the ranks get."])
    by_name = {variable: [value._asdict() for value in values] for variable, values in origins.items()}
    data = {"variables": by_name, "machine": where}
    return Result(data, text if origins else f"nemo2 sets no variables for {where}.")
