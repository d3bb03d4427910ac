# SPDX-License-Identifier: Apache-2.0
"""``nemo2 new-recipe``: starts a recipe of your own."""

from pathlib import Path
from typing import Annotated

import typer

from nemo2.cli.adapter import Result


def new_recipe(
    name: str,
    *,
    parent: Annotated[str, typer.Option("--from")],
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("."),
) -> Result:
    """Create a recipe file of your own, based on another recipe.

    Comments in the file show where to put your changes.

    Args:
        name: Name of the new recipe, a Python identifier such as my_llama.
        parent: Recipe to start from: a name or file.py.
        output: Directory for NAME.py.

    Example: nemo2 new-recipe my_llama --from llama3_8b
    """
    from nemo2 import recipes
    from nemo2.recipes._page import check_name, page

    check_name(name)
    file = output / f"{name}.py"
    refuse_existing(file)
    write_new(file, page(name, parent, recipes.get(parent)))
    text = f"{file}: print it with `nemo2 show {as_source(file)}`; to add it to `nemo2 list`, run\n"
    return Result({"file": str(file)}, f"{text}  export NEMO2_RECIPES={output.resolve()}")


def refuse_existing(path: Path) -> None:
    """Raise ConfigError if a recipe can't be written to ``path``: the file exists, or Python couldn't import it."""
    from nemo2.errors import ConfigError

    if path.suffix == ".py" and not path.stem.isidentifier():
        raise ConfigError(f"{path} must be a Python file that can be imported, such as my_recipe.py.")
    if path.exists():
        raise ConfigError(f"{path} already exists: use another name, or remove it first.")


def write_new(path: Path, text: str) -> None:
    """Write a file that doesn't exist yet, and its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)


def as_source(path: Path) -> str:
    """The path as a user would type it, with a slash, so that commands don't take the path for a name."""
    return str(path) if "/" in str(path) else f"./{path}"


def docstring(text: str) -> str:
    """Text for a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")
