# SPDX-License-Identifier: Apache-2.0
"""``nemo2 explain``: why a setting of a recipe is what it is."""

from typing import Annotated, Any, Optional

import typer

from nemo2.cli.sources import Gpus, spread

EXAMPLE = "Example: nemo2 explain llama3_8b overlap_param_gather strategy.ddp_config.overlap_grad_sync=False"

_ENVIRONMENT = "environment"


def register(app: typer.Typer) -> None:
    app.command("explain", epilog=EXAMPLE)(explain)


def explain(
    name: Annotated[
        str, typer.Argument(help="A recipe: a name of `nemo2 list`, a file.py, a recipe.json or a run's directory.")
    ],
    words: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="A field, by its path or its name alone, then changes such as trainer.max_steps=100. No field: every "
            "setting that differs from its default. 'environment': the variables of the ranks."
        ),
    ] = None,
    gpus: Gpus = None,
    performance: Annotated[bool, typer.Option("--performance", help="The recipe's performance mode.")] = False,
    executor: Annotated[
        Optional[str],
        typer.Option("--executor", help="With 'environment': a cluster's profile (`nemo2 cluster list`)."),
    ] = None,
    plugins: Annotated[
        Optional[list[str]], typer.Option("--plugins", help="With 'environment': as of `nemo2 pretrain`.")
    ] = None,
) -> None:
    """Explain a setting: its value, everybody who set it, what the run makes of it, and why."""
    from nemo2.errors import ConfigError

    words = list(words or [])
    fields = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(fields) > 1:
        raise ConfigError(f"{', '.join(fields)}: one field at a time, then changes of the form path=value.")
    if fields == [_ENVIRONMENT]:
        recipe = _recipe(name, overrides, performance=performance)
        print("\n".join(_variables(recipe, gpus, executor, plugins or [])))
        return
    if executor or plugins:
        raise ConfigError(f"--executor and --plugins say who sets variables: nemo2 explain {name} {_ENVIRONMENT} ...")
    from nemo2.explain.fields import explain as explain_field
    from nemo2.explain.fields import explain_all
    from nemo2.settle.machine import HERE, Machine
    from nemo2.settle.settling import settle

    recipe = spread(_recipe(name, overrides, performance=performance), gpus)
    effective = settle(recipe, Machine.named(gpus or HERE))
    found = explain_field(recipe, effective, fields[0]) if fields else explain_all(recipe, effective)
    print("\n\n".join(map(str, found)) if fields else "\n".join(one.line() for one in found))
    size = effective.world.size if effective.world else effective.layout.model_parallel_size
    ranks = f"{size} rank{'' if size == 1 else 's'}"
    how = "; the last line of each setting is what runs" if fields else ""
    print(f"\nOn {ranks} of {effective.machine.describe()}, {effective.layout.describe()}{how}.")
    for refusal in effective.messages:
        print(f"\nThe run would be refused: {refusal}")


def _variables(recipe: Any, gpus: Optional[str], executor: Optional[str], plugins: list[str]) -> list[str]:
    import nemo_run

    import nemo2.plugins  # noqa: F401  (whose names it announces)
    from nemo2.launch.clusters import named as executor_named
    from nemo2.launch.launcher import apply_shape, machine_of
    from nemo2.launch.plugins import made, named
    from nemo2.launch.variables import given_variables, lines
    from nemo2.settle.machine import Machine

    made_executor, _ = executor_named(executor)
    local = made_executor in (None, "local") or isinstance(made_executor, nemo_run.LocalExecutor)
    recipe = spread(recipe, gpus)
    machine = Machine.named(gpus) if gpus else machine_of(made_executor, None, local=local)
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
    where = f"{nodes} node{'s' if nodes > 1 else ''} x {devices} of {machine.describe()}"
    if not found:
        return [f"No variable is set for {where}."]
    return [*lines(found), f"\nOn {where}; the first line of each is what the ranks get."]


def _recipe(name: str, overrides: list[str], *, performance: bool) -> Any:
    from nemo2.cli.sources import configured

    if not performance:
        return configured(name, overrides)
    from nemo2 import recipes
    from nemo2.config import apply_overrides

    recipe = recipes.get(name).pretrain_recipe(performance_mode=True)
    return apply_overrides(recipe, overrides) or recipe
