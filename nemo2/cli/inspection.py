# SPDX-License-Identifier: Apache-2.0
"""``nemo2 list`` and ``nemo2 show``: which recipes there are, and the whole of one."""

import fnmatch
import json
import sys
from typing import Annotated, Any, Optional

import typer

LIST_EXAMPLE = "Example: nemo2 list 'llama3*'"
SHOW_EXAMPLE = "Example: nemo2 show llama3_8b strategy.tensor_model_parallel_size=4"

RecipeName = Annotated[str, typer.Argument(help="A recipe; `nemo2 list` names them.")]
Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(help="Changes such as trainer.max_steps=100 or strategy.ddp.overlap_grad_reduce=False."),
]

_COLUMNS = ("name", "family", "parameters", "gpus", "layout", "seq", "precision")
_RIGHT = ("parameters", "gpus", "seq")


def register(app: typer.Typer) -> None:
    app.command("list", epilog=LIST_EXAMPLE)(list_recipes)
    app.command("show", epilog=SHOW_EXAMPLE)(show)


def list_recipes(
    pattern: Annotated[
        Optional[str],
        typer.Argument(help="Only recipes whose name or family contains this, or matches it with * and ?."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the recipes with their default size and layout."""
    from nemo2 import recipes

    rows = [row(recipes.get(name).RECIPE) for name in recipes.names()]
    if pattern is not None:
        rows = [item for item in rows if matches(pattern, item["name"]) or matches(pattern, item["family"])]
        if not rows:
            from nemo2.errors import ConfigError
            from nemo2.names import did_you_mean

            raise ConfigError(f"No recipe matches {pattern!r}{did_you_mean(pattern, recipes.names())}")
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(table([{**item, "parameters": short_count(item["parameters"])} for item in rows]))


def show(
    name: RecipeName,
    overrides: Overrides = None,
    flat: Annotated[bool, typer.Option("--flat", help="One dotted path per line, for grep and diff.")] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help="Also what nobody has set.")] = False,
    who: Annotated[bool, typer.Option("--who", help="Also the file and line that set each value.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The recipe as JSON that can be loaded again.")] = False,
) -> None:
    """Show everything a recipe sets, with your changes applied."""
    recipe = configured(name, overrides or [])
    if as_json:
        from nemo2.config.serialize import to_json

        print(to_json(recipe, indent=2))
        return
    from nemo2.config.show import flatten, format_value, render

    if flat:
        print("\n".join(f"{path}={format_value(value)}" for path, value in flatten(recipe, defaults=defaults).items()))
    else:
        print(render(recipe, defaults=defaults, who=who))


def configured(name: str, overrides: list[str]) -> Any:
    """The pre-training recipe ``name`` with ``overrides`` applied.

    Raises:
        ConfigError: an unknown recipe, or overrides that don't fit; all of them are named.
    """
    from nemo2 import recipes

    module = recipes.get(name)
    if overrides:
        # Before the recipe is built, which takes seconds: a word that isn't an override at all.
        from nemo2.errors import ConfigError

        if strange := [text for text in overrides if "=" not in text]:
            raise ConfigError(
                f"{', '.join(map(repr, strange))}: not a change of the form path=value, such as trainer.max_steps=100."
            )
    recipe = module.pretrain_recipe()
    if overrides:
        from nemo2.config import apply_overrides

        recipe = apply_overrides(recipe, overrides) or recipe
    return recipe


def row(recipe: Any) -> dict[str, Any]:
    """A recipe's facts as ``nemo2 list`` shows them."""
    return {
        "name": recipe.name,
        "family": recipe.family,
        "parameters": int(recipe.parameters),
        "gpus": recipe.nodes * recipe.gpus_per_node,
        "layout": layout_text(recipe.layout),
        "seq": recipe.seq_length,
        "precision": recipe.precision.rpartition(":")[2],
    }


def layout_text(layout: Any) -> str:
    """``tp=2 pp=4 vp=5 sp``: what differs from plain data parallelism; ``dp`` if nothing does."""
    parts = [
        f"{name}={value}"
        for name in ("tp", "pp", "vp", "cp", "ep", "etp")
        if (value := getattr(layout, name)) not in (1, None)
    ]
    return " ".join([*parts, "sp"] if layout.sp else parts) or "dp"


def short_count(value: float) -> str:
    """``8030000000`` as ``8.03B``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return str(int(value))


def matches(pattern: str, text: str) -> bool:
    """Case does not matter; a pattern without wildcards is looked for anywhere."""
    pattern, text = pattern.lower(), text.lower()
    return fnmatch.fnmatchcase(text, pattern) if any(c in pattern for c in "*?[") else pattern in text


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns; the header is bold on a terminal."""
    cells = [{name: str(item[name]) for name in _COLUMNS} for item in rows]
    widths = {name: max([len(name), *(len(item[name]) for item in cells)]) for name in _COLUMNS}

    def line(item: dict[str, str]) -> str:
        return "  ".join(
            item[name].rjust(widths[name]) if name in _RIGHT else item[name].ljust(widths[name]) for name in _COLUMNS
        ).rstrip()

    header = line({name: name for name in _COLUMNS})
    bold = f"\033[1m{header}\033[0m" if sys.stdout.isatty() else header
    return "\n".join([bold, *map(line, cells)])
