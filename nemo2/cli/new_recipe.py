# SPDX-License-Identifier: Apache-2.0
"""``nemo2 new-recipe``: starts a recipe of your own."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing, write_file
from nemo2.cli.adapter import Result
from nemo2.cli.flags import FileOrFolder


def new_recipe(
    name: str,
    *,
    parent: Annotated[str, typer.Option("--from")],
    output: FileOrFolder = None,
) -> Result:
    """Create a recipe file of your own, based on another recipe.

    Comments in the file show where to put your changes.

    Args:
        name: Name of the new recipe, a Python identifier such as my_llama.
        parent: Recipe to start from: a name or file.py.
        output: File to write (.py), or its directory. Default: NAME.py here.

    Example: nemo2 new-recipe my_llama --from llama3_8b
    """
    from nemo2 import recipes
    from nemo2.recipes._page import check_name, page

    check_name(name)
    file = output or Path(f"{name}.py")
    file = file if file.suffix == ".py" else file / f"{name}.py"
    check_importable(file)
    refuse_existing(file)
    write_file(file, page(name, parent, recipes.get(parent)), new=True)
    text = f"{file}: print it with `nemo2 show {as_source(file)}`; to add it to `nemo2 list`, run\n"
    return Result({"file": str(file)}, f"{text}  export NEMO2_RECIPES={shlex.quote(str(file.resolve().parent))}")


def check_importable(path: Path) -> None:
    """Raise ConfigError if ``path`` is a Python file that couldn't be imported."""
    if path.suffix == ".py" and not path.stem.isidentifier():
        raise ConfigError(f"{path} must be a Python file that can be imported, such as my_recipe.py.")


def as_source(path: Path) -> str:
    """The path as a user would type it in a shell, with a slash, so that commands don't take the path for a name."""
    return shlex.quote(str(path) if "/" in str(path) else f"./{path}")


def docstring(text: str) -> str:
    """Text for a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")
