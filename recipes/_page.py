# SPDX-License-Identifier: Apache-2.0
"""Writes the file of ``nemo2 new-recipe``: a recipe of the user's own that states only its differences from another
recipe."""

import importlib.util
import keyword
from pathlib import Path
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.recipes._assembler import Layout, PretrainRecipe

_OFTEN_CHANGED = (
    "seq_length",
    "global_batch_size",
    "micro_batch_size",
    "nodes",
    "gpus_per_node",
    "layout",
    "max_steps",
    "max_lr",
)

_OF_FACTS = '''"""{name}: {parent}, but for what is said here.

`nemo2 show ./{name}.py --diff {parent}` shows what that comes to.
"""

{imports}

RECIPE = PARENT.but(
    name="{name}",
    # The parent's facts; those that are to differ go here.
{facts}
    # A mapping is replaced as a whole: take along what is to stay.
    # config={{**PARENT.config, "num_layers": 16}},
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
'''

_OF_A_FUNCTION = '''"""{name}: {parent}, but for what is set here.

`nemo2 show ./{name}.py --diff {parent}` shows what that comes to.
"""

from nemo2 import Partial, recipes

PARENT = recipes.get("{address}")


def pretrain_recipe() -> Partial:
    """The parent's run with changes."""
    recipe = PARENT.pretrain_recipe()
    # Your changes go here, for example:
    # recipe.trainer.max_steps = 1000
    return recipe
'''


def check_name(name: str) -> None:
    """Refuse a name that a user's recipe can't have.

    Raises:
        ConfigError: the name isn't a Python identifier, belongs to a shipped recipe, or to a module that would be
            imported in its place.
    """
    from nemo2.recipes import names

    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a valid recipe name. Use letters, digits and _, as in my_llama.")
    if name in names():
        raise ConfigError(f"{name!r} is a shipped recipe. Choose another name, such as my_{name}.")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is an installed Python module. Choose another name, such as my_{name}.")


def page(name: str, parent: str, module: Any) -> str:
    """The source of a recipe ``name`` that starts from ``parent``, whose module is given."""
    from nemo2.recipes import names
    from nemo2.recipes._own import is_path

    address = str(Path(parent).resolve()) if is_path(parent) else parent
    facts: PretrainRecipe | None = module.RECIPE
    if facts is None:
        return _OF_A_FUNCTION.format(name=name, parent=parent, address=address)
    if parent in names():
        imports = f"from nemo2.recipes import {parent}\n\nPARENT = {parent}.RECIPE"
    else:
        imports = f'from nemo2 import recipes\n\nPARENT = recipes.get("{address}").RECIPE'
    lines = [f"    # {fact}={_written(getattr(facts, fact))}" for fact in _OFTEN_CHANGED]
    source = _OF_FACTS.format(name=name, parent=parent, imports=imports, facts="\n".join(lines))
    return source + ("tokenizer = RECIPE.tokenizer\n" if hasattr(facts, "tokenizer") else "")


def _written(value: Any) -> str:
    if isinstance(value, Layout):
        stated = {name: size for name, size in vars(value).items() if size != getattr(Layout(), name)}
        arguments = ", ".join(f"{name}={size}" for name, size in stated.items())
        return f"Layout({arguments}),  # from nemo2.recipes import Layout"
    return f"{value:_}," if isinstance(value, int) and value >= 100_000 else f"{value!r},"
