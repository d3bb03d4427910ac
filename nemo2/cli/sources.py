# SPDX-License-Identifier: Apache-2.0
"""The sources of a recipe on the command line: a name, a file of one's own, a recipe in JSON or YAML, a run's directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.own_data import give_data, refuse_unknown_tokenizer
from nemo2.cli.recipe_files import NAME, changes_in, names_its_run, recipe_file, recipe_in

FINETUNING = {"lora": "lora", "dora": "dora", "full": "none"}
"""What follows a recipe's name and a colon, and the ``peft_scheme`` that it means."""
RecipeName = Annotated[
    str,
    typer.Argument(
        help="A recipe: a name from `nemo2 list`, a .py, .json or .yaml file, or a run (directory or name). Append :lora, :dora "
        "or :full to a name to fine-tune."
    ),
]
Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(help="Changes to the recipe, such as trainer.max_steps=100 strategy.ddp.overlap_grad_reduce=False."),
]


def configured(name: str, overrides: list[str], *, performance: bool = False, data: Optional[str] = None) -> Any:
    """The recipe that ``name`` stands for with ``overrides`` applied.

    Args:
        performance: In its performance mode.
        data: The user's, which it trains on (`nemo2.cli.own_data`).

    Raises:
        ConfigError: an unknown recipe, a recipe without that mode, no such data, or overrides that don't fit; all of them are
            named.
    """
    return changed(lambda: recipe_tree(name, performance=performance), overrides, data=data)


def changed(make: Callable[[], Any], overrides: list[str], *, data: Optional[str] = None) -> Any:
    """The recipe that ``make`` gives, on ``data`` where there are any, with ``overrides`` applied. Raises as `configured`."""
    # Before the recipe is built, which takes seconds: a word that isn't an override at all.
    if strange := [text for text in overrides if "=" not in text]:
        from nemo2.errors import ConfigError

        raise ConfigError(
            f"{', '.join(map(repr, strange))}: not a change of the form path=value, such as trainer.max_steps=100."
        )
    recipe = make()
    if data is not None:
        give_data(recipe, data)
    if overrides:
        from nemo2.config import apply_overrides

        recipe = apply_overrides(recipe, overrides) or recipe
    if data is not None:
        refuse_unknown_tokenizer(recipe, data)
    return recipe


def recipe_tree(source: str, *, performance: bool = False, **finetuning: Any) -> Any:
    """The recipe that ``source`` stands for, as a tree to edit.

    A name of `nemo2 list`; ``file.py`` or ``file.py:NAME``, which are imported; both for pre-training, and with ``:lora``,
    ``:dora`` or ``:full`` behind them for fine-tuning; ``file.json``, ``file.yaml`` or a run's directory, which are read without
    running anything from them.

    Args:
        performance: In its performance mode.
        finetuning: Further arguments of ``finetune_recipe``.

    Raises:
        ConfigError: there is none, or it can't be imported or read; arguments of a factory for a recipe in JSON.
        SecurityError: the JSON names something that recipes don't use.
    """
    name, method = finetuned_name(source)
    file = recipe_file(name)
    if file is None:
        return _by_name(name, method, performance, finetuning)
    asked = [*["--performance"] * performance, *[f":{method}"] * bool(method)]
    asked = ", ".join([*asked, *(f"{key}={value}" for key, value in finetuning.items())])

    def by_name(other: str, its_mode: bool) -> Any:
        plain, its_method = finetuned_name(other)
        if method and its_method:
            from nemo2.errors import ConfigError

            raise ConfigError(f"{source} says {method}, and {file} is of {other}: leave one of them out.")
        return _by_name(plain, its_method or method, performance or its_mode, finetuning)

    return recipe_in(file, asked, by_name)


def _by_name(name: str, method: Optional[str], performance: bool, finetuning: dict[str, Any]) -> Any:
    from nemo2 import recipes

    recipe = recipes.get(name)
    arguments = {**finetuning, **({"performance_mode": True} if performance else {})}
    return recipe.pretrain_recipe(**arguments) if method is None else _finetuned(recipe, name, method, arguments)


def finetuned_name(source: str) -> tuple[str, Optional[str]]:
    """A recipe's name without ``:lora``, ``:dora`` or ``:full``, and which of them it was; None for pre-training."""
    name, _, method = source.rpartition(":")
    return (name, method) if name and method in FINETUNING else (source, None)


def method_of(source: str) -> tuple[bool, Optional[str]]:
    """Whether the recipe is made to order, by name, and the method of fine-tuning that it names; None for none."""
    name, method = finetuned_name(source)
    file = recipe_file(name)
    if file is None:
        return True, method
    form = changes_in(file)
    return form is not None, None if form is None else method or finetuned_name(str(form[NAME]))[1]


def _finetuned(recipe: Any, name: str, method: str, arguments: dict[str, Any]) -> Any:
    make = getattr(recipe, "finetune_recipe", None)
    if make is None:
        from nemo2.errors import ConfigError

        raise ConfigError(f"{name} has no fine-tuning recipe: `nemo2 list --finetune` lists the recipes that have one.")
    return make(peft_scheme=FINETUNING[method], **arguments)


def name_of_run(source: str) -> Optional[str]:
    """How a run of this recipe is called unless told otherwise; None keeps the name that it has in its file."""
    file = recipe_file(finetuned_name(source)[0])
    if file is not None:
        return None if names_its_run(file) else file.stem
    return Path(source).name.replace(".py", "").replace(":", "_")
