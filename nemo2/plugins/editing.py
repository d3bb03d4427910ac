# SPDX-License-Identifier: Apache-2.0
"""What plugins do to a recipe and an executor, with the user's own settings left as they are."""

import inspect
import sys
from typing import Any

from nemo2.config.tree import Config
from nemo2.config.walk import select
from nemo2.errors import ConfigError


def add_callback(plugin: Any, task: Any, callback: Any, **arguments: Any) -> None:
    """Put a config of the class ``callback`` at the end of ``task.trainer.callbacks``.

    Raises:
        ConfigError: the recipe has one already, or no trainer.
    """
    trainer = trainer_of(plugin, task)
    if select(trainer.callbacks or [], callback):
        raise ConfigError(
            f"{type(plugin).__name__} adds {callback.__name__}, and trainer.callbacks has one: set its fields there, or leave "
            "the plugin out."
        )
    parameters = inspect.signature(callback).parameters
    asked = {name: value for name, value in arguments.items() if value != parameters[name].default}
    trainer.callbacks = [*(trainer.callbacks or []), Config(callback, **asked)]


def trainer_of(plugin: Any, task: Any) -> Any:
    """The trainer of a recipe.

    Raises:
        ConfigError: the task is a script, or a function without a trainer.
    """
    trainer = getattr(task, "trainer", None)
    if trainer is None:
        raise ConfigError(f"{type(plugin).__name__} edits recipe.trainer, and this task has none: give it a recipe.")
    return trainer


def set_variable(plugin: Any, executor: Any, name: str, value: str) -> None:
    """Give the ranks a variable, unless the executor has it: what the user has set stays, and that is said."""
    given = executor.env_vars.get(name)
    if given is not None and given != value:
        print(
            f"warning: {type(plugin).__name__} would set {name}={value}; {name}={given} of the executor stays.",
            file=sys.stderr,
        )
        return
    executor.env_vars[name] = value
