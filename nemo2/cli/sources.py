# SPDX-License-Identifier: Apache-2.0
"""The sources of a recipe on the command line: a name, a Python file, a JSON or YAML file, or a run's directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.cli.own_data import give_data, refuse_data
from nemo2.cli.recipe_files import NAME, changes_in, names_its_run, recipe_file, recipe_in
from nemo2.training.run_dir.records import RECIPE_FILE

FINETUNING = {"lora": "lora", "dora": "dora", "full": "none"}
"""The words that may follow a recipe's name and a colon, each with its ``peft_scheme``."""
Method = Literal["lora", "dora", "full"]
"""The words of `FINETUNING`."""
RECIPE_HELP = (
    "A recipe: a name from `nemo2 list`, a .py, .json or .yaml file, or a run (directory or name). Append :lora, :dora "
    "or :full to a name to fine-tune."
)
RecipeName = Annotated[str, typer.Argument(help=RECIPE_HELP)]
OptionalRecipe = Annotated[Optional[str], typer.Argument(help=f"{RECIPE_HELP} Optional with --from.")]
Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(help="Changes to the recipe, such as trainer.max_steps=100 strategy.ddp.overlap_grad_reduce=False."),
]


def configured(name: str, overrides: list[str], *, performance: bool = False, data: Optional[str] = None) -> Any:
    """The recipe that ``name`` stands for with ``overrides`` applied.

    Args:
        performance: Use the recipe's performance mode.
        data: The path of the user's data (`nemo2.cli.own_data`). None: the recipe's data.

    Raises:
        ConfigError: an unknown recipe, a recipe without a performance mode, missing data, or invalid overrides. The
            message lists all overrides that are invalid.
    """
    return changed(lambda: recipe_tree(name, performance=performance), overrides, data=data)


def changed(make: Callable[[], Any], overrides: list[str], *, data: Optional[str] = None) -> Any:
    """The recipe that ``make`` returns, with ``data`` and ``overrides`` applied. Errors: see `configured`."""
    # Building the recipe takes seconds. Words that aren't overrides at all are refused first.
    if strange := [text for text in overrides if "=" not in text]:
        for word in strange:
            refuse_data(word, "change of the recipe")
        example = "=".join(strange) if len(strange) == 2 and "." in strange[0] else "trainer.max_steps=100"
        raise ConfigError(f"{', '.join(map(repr, strange))}: not a change of the form path=value, such as {example}.")
    recipe = make()
    if data is not None:
        give_data(recipe, data)
    if overrides:
        from nemo2.config import apply_overrides

        recipe = apply_overrides(recipe, overrides) or recipe
    return recipe


def recipe_tree(source: str, *, performance: bool = False, **finetuning: Any) -> Any:
    """The recipe that ``source`` stands for, as a tree to edit.

    ``source`` is a name of `nemo2 list`, or ``file.py`` or ``file.py:NAME``, which is imported. These make a recipe for
    pre-training, or with ``:lora``, ``:dora`` or ``:full`` behind them a recipe for fine-tuning. Or ``source`` is
    ``file.json``, ``file.yaml`` or a run's directory, from which no code runs.

    Args:
        performance: Use the recipe's performance mode.
        finetuning: Further arguments of ``finetune_recipe``.

    Raises:
        ConfigError: there is no such recipe, or it can't be imported or read; or a recipe in JSON gets arguments of a
            factory.
        SecurityError: the file names something that recipes don't use.
    """
    name, method = finetuned_name(source)
    file = recipe_file(name)
    if file is None:
        return _by_name(name, method, performance, finetuning)
    requested = [*["--performance"] * performance, *[f":{method}"] * bool(method)]
    requested = ", ".join([*requested, *(f"{key}={value}" for key, value in finetuning.items())])

    def by_name(other: str, its_mode: bool) -> Any:
        plain, its_method = finetuned_name(other)
        if method and its_method:
            raise ConfigError(
                f"{source} asks for the method {method}, but {file} names the recipe {other}: leave one of them out."
            )
        return _by_name(plain, its_method or method, performance or its_mode, finetuning)

    return recipe_in(file, requested, by_name)


def _by_name(name: str, method: Optional[str], performance: bool, finetuning: dict[str, Any]) -> Any:
    from nemo2 import recipes

    base, colon, word = name.rpartition(":")
    if colon and base in recipes.names():
        raise ConfigError(f"{name}: {word!r} is not a method of fine-tuning{did_you_mean(word, list(FINETUNING))}")
    try:
        recipe = recipes.get(name)
    except ConfigError:
        refuse_data(name, "recipe")
        raise
    arguments = {**finetuning, **({"performance_mode": True} if performance else {})}
    return recipe.pretrain_recipe(**arguments) if method is None else _finetuned(recipe, name, method, arguments)


def finetuned_name(source: str) -> tuple[str, Optional[str]]:
    """A recipe's name without ``:lora``, ``:dora`` or ``:full``, and the removed word; None for pre-training."""
    name, _, method = source.rpartition(":")
    return (name, method) if name and method in FINETUNING else (source, None)


def method_of(source: str) -> tuple[bool, Optional[str]]:
    """Whether ``source`` is a named recipe, and the method of fine-tuning in it; None for pre-training."""
    name, method = finetuned_name(source)
    file = recipe_file(name)
    if file is None:
        return True, method
    form = changes_in(file)
    return form is not None, None if form is None else method or finetuned_name(str(form[NAME]))[1]


def _finetuned(recipe: Any, name: str, method: str, arguments: dict[str, Any]) -> Any:
    make = getattr(recipe, "finetune_recipe", None)
    if make is None:
        raise ConfigError(f"{name} has no fine-tuning recipe: `nemo2 list --finetune` lists the recipes that have one.")
    return make(peft_scheme=FINETUNING[method], **arguments)


def name_of_run(source: str, recipe: Any) -> Optional[str]:
    """The name of a run of ``recipe``, for which ``source`` stands: the one that it sets, or else one after ``source``."""
    file = recipe_file(finetuned_name(source)[0])
    if file is not None:
        return recipe.log.name if names_its_run(file) else file.stem
    if recipe.log.name not in (None, "default"):  # the factories' name of a run that nobody named
        return recipe.log.name
    return Path(source).name.replace(".py", "").replace(":", "_")


def run_with_recipe(*checkpoints: Path | str) -> Path:
    """The directory of the run that wrote one of the checkpoints.

    Raises:
        ConfigError: none of them is in a run's directory with a recipe.
    """
    from nemo2.hugging_face.checkpoint import Checkpoint

    for path in checkpoints:
        run = Checkpoint.open(path).path.parent.parent
        if (run / RECIPE_FILE).is_file():
            return run
    none = "is not" if len(checkpoints) == 1 else "are not"
    raise ConfigError(
        f"{' and '.join(map(str, checkpoints))} {none} in a run directory with a recipe: use --recipe NAME to provide trainer "
        "and data."
    )
