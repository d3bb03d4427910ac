# SPDX-License-Identifier: Apache-2.0
"""``nemo2 explain``: the value of a setting in a run, and the reason for the value."""

from typing import Annotated, Any, Optional

import typer

from nemo2.cli.flags import AsJson, Devices, Gpus, Nodes, Performance, machine_of, print_json, recipe_on
from nemo2.cli.own_data import Data
from nemo2.cli.sources import RecipeName

EXAMPLE = "Example: nemo2 explain llama3_8b overlap_param_gather strategy.ddp_config.overlap_grad_sync=False"

_ENVIRONMENT = "environment"


def register(app: typer.Typer) -> None:
    app.command("explain", epilog=EXAMPLE)(explain)


def explain(
    name: RecipeName,
    words: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="A field (path or name), then changes such as trainer.max_steps=100. Without a field: every setting that "
            "differs from its default. 'environment': the environment variables of the ranks."
        ),
    ] = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    devices: Devices = None,
    performance: Performance = False,
    data: Data = None,
    executor: Annotated[
        Optional[str],
        typer.Option("--executor", help="With 'environment': a cluster profile (`nemo2 cluster list`)."),
    ] = None,
    plugins: Annotated[
        Optional[list[str]], typer.Option("--plugins", help="With 'environment': plugins, as in `nemo2 pretrain`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a setting: its value in the run, every place that set it, and why."""
    from nemo2.errors import ConfigError

    words = list(words or [])
    fields = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(fields) > 1:
        raise ConfigError(f"{', '.join(fields)}: give one field, then changes of the form path=value.")
    if fields != [_ENVIRONMENT] and (executor or plugins):
        raise ConfigError(
            f"--executor and --plugins need the word {_ENVIRONMENT}: nemo2 explain {name} {_ENVIRONMENT} ..."
        )
    recipe = recipe_on(name, overrides, gpus=gpus, nodes=nodes, devices=devices, performance=performance, data=data)
    if fields == [_ENVIRONMENT]:
        _tell_variables(recipe, gpus, executor, plugins or [], as_json=as_json)
        return
    from nemo2.explain.fields import explain as explain_field
    from nemo2.explain.fields import explain_all
    from nemo2.settle.machine import Machine
    from nemo2.settle.settling import settle

    effective = settle(recipe, Machine.here() if gpus is None else machine_of(gpus))
    found = explain_field(recipe, effective, fields[0]) if fields else explain_all(recipe, effective)
    size = effective.world.size if effective.world else effective.layout.model_parallel_size
    if as_json:
        print_json(_as_data(found, effective, size))
        return
    print("\n\n".join(map(str, found)) if fields else "\n".join(one.line() for one in found))
    ranks = f"{size} rank{'' if size == 1 else 's'}"
    how = "; the last line of each setting is the value in the run" if fields else ""
    print(f"\nOn {ranks} of {effective.machine.describe()}, {effective.layout.describe()}{how}.")
    for refusal in effective.messages:
        print(f"\nThe run would stop with an error: {refusal}")


def _as_data(found: list[Any], effective: Any, size: int) -> dict[str, Any]:
    from nemo2.config.show import plain

    def layers(one: Any) -> list[dict[str, Any]]:
        return [{"value": plain(layer.value), "who": layer.who, "asked": layer.asked} for layer in one.layers]

    return {
        "settings": [{"path": one.path, "value": plain(one.effective), "layers": layers(one)} for one in found],
        "machine": effective.machine.describe(),
        "ranks": size,
        "layout": effective.layout.describe(),
        "refused": list(effective.messages),
    }


def _tell_variables(
    recipe: Any, gpus: Optional[str], executor: Optional[str], plugins: list[str], *, as_json: bool
) -> None:
    import nemo2.plugins  # noqa: F401  (whose names it announces)
    from nemo2.launch.launcher import apply_shape, place_of
    from nemo2.launch.plugins import made, named
    from nemo2.launch.variables import given_variables, lines

    made_executor, _, machine = place_of(executor, None)
    machine = machine_of(gpus) if gpus else machine
    devices, nodes, _ = apply_shape(recipe, machine, devices=None, nodes=None, name=None)
    found = given_variables(
        recipe,
        None if made_executor in (None, "local") else made_executor.clone(),
        machine,
        plugins=made(named(plugins)),
        devices=devices,
        nodes=nodes,
        profile=executor or "",
    )
    where = f"{nodes} node{'s' if nodes > 1 else ''} x {machine.counted(devices)}"
    if as_json:
        variables = {variable: [one._asdict() for one in values] for variable, values in found.items()}
        print_json({"variables": variables, "machine": where})
    elif not found:
        print(f"nemo2 sets no variables for {where}.")
    else:
        print("\n".join([*lines(found), f"\nOn {where}; the first line of each is the value that the ranks get."]))
