# SPDX-License-Identifier: Apache-2.0
"""The sources of a recipe on the command line: a name, a file of one's own, a recipe in JSON, a run's directory."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from nemo2.settle.machine import Machine

RECIPE_FILE = "recipe.json"
FINETUNING = {"lora": "lora", "dora": "dora", "full": "none"}
"""What follows a recipe's name and a colon, and the ``peft_scheme`` that it means."""
_MOST_BYTES = 64 << 20
RecipeName = Annotated[
    str,
    typer.Argument(
        help="A recipe: a name of `nemo2 list`, NAME:lora, :dora or :full to fine-tune it, a file.py, a recipe.json or a run's "
        "directory."
    ),
]
Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(help="Changes such as trainer.max_steps=100 or strategy.ddp.overlap_grad_reduce=False."),
]

Gpus = Annotated[
    Optional[str],
    typer.Option(
        "--gpus", "--gpu", help="For these: H100, or H100x64, which are nodes of 8 or of the trainer's devices."
    ),
]


def machine_of(gpus: Optional[str]) -> "Machine":
    """The machine that ``--gpus`` names; without it GPUs of any kind.

    Raises:
        ConfigError: an unknown GPU, or a number that is none.
    """
    from nemo2.settle.machine import Machine

    return Machine() if gpus is None else Machine.named(gpus)


def where(recipe: Any, machine: "Machine") -> str:
    """The line that names the machine of an answer."""
    from nemo2.settle.world import world_of

    world = world_of(recipe, machine)
    return f"for {world.nodes} node{'s' if world.nodes > 1 else ''} x {world.devices} of {machine.describe()}"


def on_machine(recipe: Any, gpus: Optional[str]) -> Any:
    """The recipe as it runs on the GPUs that ``--gpus`` names, and on stderr which these are: stdout may be read by others.

    Raises:
        ConfigError: as `machine_of`; GPUs that are no whole nodes.
    """
    recipe = spread(recipe, gpus)
    if getattr(recipe, "trainer", None) is not None:
        print(where(recipe, machine_of(gpus)), file=sys.stderr)
    return recipe


def spread(recipe: Any, gpus: Optional[str]) -> Any:
    """The recipe with the nodes and devices that so many GPUs are; itself where ``--gpus`` names no number of them.

    Raises:
        ConfigError: as `machine_of`; GPUs that are no whole nodes.
    """
    machine = machine_of(gpus)
    if machine.count is None:
        return recipe
    from fiddle import history

    from nemo2.settle.world import on

    with history.custom_location(lambda: history.Location(f"--gpus {gpus}", 1, None)):
        return on(recipe, machine)


def configured(name: str, overrides: list[str]) -> Any:
    """The recipe that ``name`` stands for with ``overrides`` applied.

    Raises:
        ConfigError: an unknown recipe, or overrides that don't fit; all of them are named.
    """
    return changed(lambda: recipe_tree(name), overrides)


def changed(make: Callable[[], Any], overrides: list[str]) -> Any:
    """The recipe that ``make`` gives with ``overrides`` applied. Raises as `configured`."""
    # Before the recipe is built, which takes seconds: a word that isn't an override at all.
    if strange := [text for text in overrides if "=" not in text]:
        from nemo2.errors import ConfigError

        raise ConfigError(
            f"{', '.join(map(repr, strange))}: not a change of the form path=value, such as trainer.max_steps=100."
        )
    recipe = make()
    if overrides:
        from nemo2.config import apply_overrides

        recipe = apply_overrides(recipe, overrides) or recipe
    return recipe


def recipe_tree(source: str, **finetuning: Any) -> Any:
    """The recipe that ``source`` stands for, as a tree to edit.

    A name of `nemo2 list`; ``file.py`` or ``file.py:NAME``, which are imported; both for pre-training, and with ``:lora``,
    ``:dora`` or ``:full`` behind them for fine-tuning; ``file.json`` or a run's directory, whose JSON is read without running
    anything from it.

    Args:
        finetuning: Further arguments of ``finetune_recipe``.

    Raises:
        ConfigError: there is none, or it can't be imported or read.
        SecurityError: the JSON names something that recipes don't use.
    """
    name, method = finetuned_name(source)
    file = _json_file(name)
    if file is None:
        from nemo2 import recipes

        recipe = recipes.get(name)
        return recipe.pretrain_recipe() if method is None else _finetuned(recipe, name, method, finetuning)
    from nemo2.config.serialize import from_json
    from nemo2.errors import ConfigError, SecurityError
    from nemo2.files import read_bounded
    from nemo2.recipes._own import VARIABLE, trusted_modules

    try:
        recipe = from_json(read_bounded(file, at_most=_MOST_BYTES), allowed_modules=trusted_modules())
    except OSError as error:
        raise ConfigError(f"{file} can't be read as a recipe ({error.strerror or error}).") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except SecurityError as error:
        raise SecurityError(
            f"{file}: {error} Where it is a name of your own recipes, commands take it from the folders in ${VARIABLE} and "
            "from packages that announce recipes."
        ) from error
    _refuse_another_start(recipe, file)
    return recipe


def finetuned_name(source: str) -> tuple[str, Optional[str]]:
    """A recipe's name without ``:lora``, ``:dora`` or ``:full``, and which of them it was; None for pre-training."""
    name, _, method = source.rpartition(":")
    return (name, method) if name and method in FINETUNING else (source, None)


def _finetuned(recipe: Any, name: str, method: str, arguments: dict[str, Any]) -> Any:
    make = getattr(recipe, "finetune_recipe", None)
    if make is None:
        from nemo2.errors import ConfigError

        raise ConfigError(f"{name} has no recipe of fine-tuning: `nemo2 list --finetune` lists those that have.")
    return make(peft_scheme=FINETUNING[method], **arguments)


def _refuse_another_start(recipe: Any, file: Path) -> None:
    """Raise where building it would start something else than a run: `generate`, say, writes what it is told where it is told."""
    from nemo2.errors import ConfigError

    parameters = getattr(getattr(recipe, "__signature_info__", None), "parameters", {})
    if not {"model", "data", "trainer"} <= parameters.keys():
        starts = getattr(getattr(recipe, "__fn_or_cls__", recipe), "__qualname__", type(recipe).__name__)
        raise ConfigError(f"{file} is a configuration of {starts}, and a recipe is one of llm.pretrain.")


def name_of_run(source: str) -> Optional[str]:
    """How a run of this recipe is called unless told otherwise; None keeps the name that it has in JSON."""
    if _json_file(finetuned_name(source)[0]) is not None:
        return None
    return Path(source).name.replace(".py", "").replace(":", "_")


def _json_file(source: str) -> Optional[Path]:
    from nemo2.errors import ConfigError

    path = Path(source)
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(f"{source}: there is no such file.")
        return path
    if path.is_dir() and ("/" in source or (path / RECIPE_FILE).is_file()):
        if not (path / RECIPE_FILE).is_file():
            raise ConfigError(f"{source} is a folder without a {RECIPE_FILE}, which every run's directory has.")
        return path / RECIPE_FILE
    return None
