# SPDX-License-Identifier: Apache-2.0
"""``nemo2 diff``, ``freeze`` and ``new-recipe``: compare recipes, write a recipe as Python, start a recipe of your
own."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import not_with
from nemo2.cli.flags import AsJson, Devices, Gpus, Nodes, Performance, machine_of, place, print_json, recipe_on
from nemo2.cli.own_data import Data
from nemo2.cli.sources import RECIPE_HELP, Overrides, RecipeName, configured
from nemo2.run_dir.terminal import is_terminal

DIFF_EXAMPLE = "Example: nemo2 diff llama3_8b llama3_70b"
FREEZE_EXAMPLE = "Example: nemo2 freeze llama3_8b trainer.max_steps=100 --output my_llama.py"
NEW_RECIPE_EXAMPLE = "Example: nemo2 new-recipe my_llama --from llama3_8b"

_COLOURS = {"~": "\033[33m", "+": "\033[32m", "-": "\033[31m"}
_RESET = "\033[0m"


def register(app: typer.Typer) -> None:
    app.command("diff", epilog=DIFF_EXAMPLE)(diff)
    app.command("freeze", epilog=FREEZE_EXAMPLE)(freeze)
    app.command("new-recipe", epilog=NEW_RECIPE_EXAMPLE)(new_recipe)


def diff(
    old: Annotated[str, typer.Argument(help=RECIPE_HELP)],
    new: Annotated[str, typer.Argument(help="Another recipe, or the same recipe to compare it with your changes.")],
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    devices: Devices = None,
    performance: Performance = False,
    data: Data = None,
    code: Annotated[bool, typer.Option("--code", help="Print a Python function that turns OLD into NEW.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show fields that one recipe sets to the other's default.")
    ] = False,
    as_json: AsJson = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with code 1 if the recipes differ in effect.")
    ] = False,
) -> None:
    """Compare two recipes.

    Changes and options apply to the second recipe.
    """
    not_with("code", "everything", "as_json", "exit_code")
    before = configured(old, [])
    after = recipe_on(new, overrides, gpus=gpus, nodes=nodes, devices=devices, performance=performance, data=data)
    from nemo2.config.edits import edits, edits_source

    label = " ".join([new, *(overrides or [])])
    if code:
        print(edits_source(before, after, doc=_doc(f"{old} as {label}.")), end="")
        return
    steps = edits(before, after)
    in_effect = [step for step in steps if not step.changes_nothing]
    shown = steps if everything else in_effect
    if as_json:
        _print_json(shown)
    else:
        _print_steps(old, label, shown, hidden=len(steps) - len(shown))
    if exit_code and in_effect:
        raise typer.Exit(1)


def freeze(
    name: RecipeName,
    overrides: Overrides = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="New .py file. Default: print.")] = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    devices: Devices = None,
    performance: Performance = False,
    data: Data = None,
) -> None:
    """Write a recipe with your changes as a Python function that rebuilds every setting."""
    if output is not None:
        _refuse_output(output)
    recipe = recipe_on(name, overrides, gpus=gpus, nodes=nodes, devices=devices, performance=performance, data=data)
    print(place(recipe, machine_of(gpus)), file=sys.stderr)  # standard output may be read by a program
    from nemo2 import __version__
    from nemo2.config.codegen import function_source

    changes = f" with {', '.join(overrides)}" if overrides else ""
    changes += f" on {gpus}" if gpus else ""
    changes += " in performance mode" if performance else ""
    source = function_source(
        recipe,
        header=_doc(f"{name}{changes}, as nemo2 {__version__} builds it. Written by `nemo2 freeze`."),
        doc="The whole run; what is not here has its class's default.",
    )
    if output is None:
        print(source, end="")
        return
    _write_new(output, source)
    print(f"{output}: run it with `nemo2 pretrain {_as_source(output)}`")


def new_recipe(
    name: Annotated[str, typer.Argument(help="Name of the new recipe, a Python identifier such as my_llama.")],
    parent: Annotated[str, typer.Option("--from", help="Recipe to start from: a name or file.py.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for NAME.py.")] = Path("."),
) -> None:
    """Create a recipe file of your own, based on another recipe.

    Comments in the file show where to put your changes.
    """
    from nemo2 import recipes
    from nemo2.recipes._page import check_name, page

    check_name(name)
    file = output / f"{name}.py"
    _refuse_output(file)
    source = page(name, parent, recipes.get(parent))
    _write_new(file, source)
    print(f"{file}: print it with `nemo2 show {_as_source(file)}`; to add it to `nemo2 list`, run")
    print(f"  export NEMO2_RECIPES={output.resolve()}")


def _print_steps(old: str, new: str, steps: list[Any], *, hidden: int) -> None:
    from nemo2.config.edits import describe

    coloured = is_terminal(sys.stdout)
    if steps:
        print(f"--- {old}\n+++ {new}")
    for mark, line in describe(steps, everything=True):
        print(f"{_COLOURS[mark]}{mark} {line}{_RESET}" if coloured else f"{mark} {line}")
    if not steps:
        print("no difference" if not hidden else "no difference in effect")
    if hidden:
        print(f"({hidden} more fields are set to the other's default; show them with --all)")


def _print_json(steps: list[Any]) -> None:
    from nemo2.config.edits import Unset
    from nemo2.config.show import plain

    def shown(value: Any) -> Any:
        return None if isinstance(value, Unset) else plain(value)

    rows = [
        {
            "path": step.path,
            "kind": step.kind,
            "old": shown(step.old),
            "new": shown(step.new),
            "in_effect": not step.changes_nothing,
        }
        for step in steps
    ]
    print_json(rows)


def _refuse_output(path: Path) -> None:
    from nemo2.errors import ConfigError

    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"{path} must be a Python file that can be imported, such as my_recipe.py.")
    if path.exists():
        raise ConfigError(f"{path} already exists: use another name, or remove it first.")


def _write_new(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def _as_source(path: Path) -> str:
    """The path as a user would type it, with a slash, so that commands don't take the path for a name."""
    return str(path) if "/" in str(path) else f"./{path}"


def _doc(text: str) -> str:
    """Text for a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")
