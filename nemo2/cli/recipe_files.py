# SPDX-License-Identifier: Apache-2.0
"""Reads recipes from untrusted files: JSON, YAML with every setting, or YAML with changes to a named recipe.

recipe: llama3_8b          # a name of `nemo2 list`; NAME:lora, :dora or :full to fine-tune it
performance: true          # its performance mode
trainer:
  max_steps: 1000
strategy.tensor_model_parallel_size: 2
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError, SecurityError
from nemo2.base.files import read_bounded
from nemo2.cli.run_names import last_started, run_called, run_of
from nemo2.training.run_dir.records import RECIPE_FILE

NAME, PERFORMANCE = "recipe", "performance"
YAML = (".yaml", ".yml")
_MOST_BYTES = 64 << 20


def recipe_file(source: str) -> Optional[Path]:
    """The file that ``source``, a word on the command line, stands for. None: a named recipe, or one in Python.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(source)
    if path.suffix in (".json", *YAML):
        if not path.is_file():
            raise ConfigError(f"{source}: there is no such file.")
        return path
    if path.is_dir() and ("/" in source or source in (".", "..") or (path / RECIPE_FILE).is_file()):
        if (run := last_started(path) or run_of(path)) is None:
            raise ConfigError(f"{source} is a directory without a {RECIPE_FILE}, and not a run directory.")
        return _recipe_of(run)
    from nemo2 import recipes

    if source in recipes.names() or path.suffix or source in recipes.own()[0]:
        return None
    named = run_called(source)
    return None if named is None or (run := last_started(named)) is None else _recipe_of(run)


def _recipe_of(run: Path) -> Path:
    if not (run / RECIPE_FILE).is_file():
        raise ConfigError(
            f"{run} has no {RECIPE_FILE}, because the run was started in a process of the user's own, which doesn't write "
            "the file. Name the recipe of the run instead."
        )
    return run / RECIPE_FILE


def recipe_in(file: Path, requested: str, by_name: Callable[[str, bool], Any]) -> Any:
    """The recipe in a file of `recipe_file`. No part of the recipe is built or called.

    Args:
        requested: The options on the command line that only a named recipe supports.
        by_name: A function that makes a named recipe, with or without its performance mode.

    Raises:
        ConfigError: the file can't be read or holds no recipe; or it holds every setting, and ``requested`` is not empty.
        SecurityError: the file names something that recipes don't use.
    """
    from nemo2.recipes._own import VARIABLE

    try:
        if (form := changes_in(file)) is not None:
            recipe = _changed(form, file, by_name)
        else:
            recipe = _whole(file, requested)
    except SecurityError as error:
        raise SecurityError(
            f"{file}: {error} If your own recipes define the name, list their folder in ${VARIABLE}, or install them as a "
            "package with the entry point nemo2.recipes."
        ) from error
    # Building may call training only: `generate`, for example, writes a file of any content to any path.
    parameters = getattr(getattr(recipe, "__signature_info__", None), "parameters", {})
    if not {"model", "data", "trainer"} <= parameters.keys():
        starts = getattr(getattr(recipe, "__fn_or_cls__", recipe), "__qualname__", type(recipe).__name__)
        raise ConfigError(
            f"{file} describes a call of {starts}, but a recipe describes a call of llm.pretrain or llm.finetune."
        )
    return recipe


def changes_in(file: Path) -> Optional[Any]:
    """The mapping in a YAML file that changes a named recipe. None: a file of another form."""
    if file.suffix not in YAML:
        return None
    from nemo2.config.yaml_form import read

    form = read(_bytes(file), str(file))
    return form if isinstance(form, dict) and NAME in form else None


def names_its_run(file: Path) -> bool:
    """Whether the recipe in a file names its run."""
    form = changes_in(file)
    if form is None:
        return True
    log = form.get("log")
    return "log.name" in form or (isinstance(log, dict) and "name" in log)


def _whole(file: Path, requested: str) -> Any:
    from nemo2.recipes._own import trusted_modules

    if requested:
        raise ConfigError(
            f"{requested}: {file} already sets every field, and only a recipe by name supports this option. Leave it out."
        )
    if file.suffix in YAML:
        from nemo2.config.yaml_form import from_yaml

        return from_yaml(_bytes(file), trusted_modules(), source=str(file))
    from nemo2.config.reading import from_json

    try:
        return from_json(_bytes(file), trusted_modules())
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _changed(form: Any, file: Path, by_name: Callable[[str, bool], Any]) -> Any:
    from nemo2.config.yaml_form import apply_form
    from nemo2.recipes._own import trusted_modules

    name, performance = form.pop(NAME), form.pop(PERFORMANCE, False)
    if not isinstance(name, str) or not name or Path(name).suffix or "/" in name:
        raise ConfigError(
            f"{file}:{form.lines[NAME]}: {NAME}: {name}: must be a name of `nemo2 list`. Change a recipe in Python on the "
            "command line, or in Python."
        )
    if not isinstance(performance, bool):
        raise ConfigError(f"{file}:{form.lines[PERFORMANCE]}: {PERFORMANCE}: takes true or false, not {performance!r}.")
    return apply_form(by_name(name, performance), form, trusted_modules(), source=str(file))


def _bytes(file: Path) -> bytes:
    try:
        return read_bounded(file, at_most=_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{file} can't be read as a recipe ({error.strerror or error}).") from error
