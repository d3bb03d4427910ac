# SPDX-License-Identifier: Apache-2.0
"""``nemo2 explain``: why a setting of a recipe is what it is."""

from typing import Annotated, Any, Optional

import typer

from nemo2.cli.sources import Gpus, spread

EXAMPLE = "Example: nemo2 explain llama3_8b overlap_param_gather strategy.ddp_config.overlap_grad_sync=False"


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
            "setting that differs from its default."
        ),
    ] = None,
    gpus: Gpus = None,
    performance: Annotated[bool, typer.Option("--performance", help="The recipe's performance mode.")] = False,
) -> None:
    """Explain a setting: its value, everybody who set it, what the run makes of it, and why."""
    from nemo2.errors import ConfigError

    words = list(words or [])
    fields = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(fields) > 1:
        raise ConfigError(f"{', '.join(fields)}: one field at a time, then changes of the form path=value.")
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


def _recipe(name: str, overrides: list[str], *, performance: bool) -> Any:
    from nemo2.cli.sources import configured

    if not performance:
        return configured(name, overrides)
    from nemo2 import recipes
    from nemo2.config import apply_overrides

    recipe = recipes.get(name).pretrain_recipe(performance_mode=True)
    return apply_overrides(recipe, overrides) or recipe
