# SPDX-License-Identifier: Apache-2.0
"""Edits that plugins make to a recipe and an executor, without changing the user's own settings."""

import inspect
from dataclasses import fields
from typing import Any

from nemo2.base.advice import print_warning
from nemo2.base.errors import ConfigError
from nemo2.config.tree import Config
from nemo2.config.walk import callbacks_of, select


def add_callback(plugin: Any, task: Any, callback: Any, **arguments: Any) -> None:
    """Append a config of the class ``callback`` to ``task.trainer.callbacks``.

    Raises:
        ConfigError: the recipe already has such a callback, or it has no trainer.
    """
    trainer = trainer_of(plugin, task)
    if select(callbacks_of(trainer), callback):
        raise ConfigError(
            f"{type(plugin).__name__} adds {callback.__name__}, but trainer.callbacks already contains this callback. "
            "Set the fields of the existing callback, or leave out the plugin."
        )
    parameters = inspect.signature(callback).parameters
    explicit = {name: value for name, value in arguments.items() if value != parameters[name].default}
    trainer.callbacks = [*callbacks_of(trainer), Config(callback, **explicit)]


def arguments_of(plugin: Any) -> dict[str, Any]:
    """The arguments of a plugin, by name."""
    return {field.name: getattr(plugin, field.name) for field in fields(plugin) if field.init}


def trainer_of(plugin: Any, task: Any) -> Any:
    """The trainer of a recipe.

    Raises:
        ConfigError: the task is a script, or a function without a trainer.
    """
    trainer = getattr(task, "trainer", None)
    if trainer is None:
        raise ConfigError(f"{type(plugin).__name__} edits recipe.trainer, but this task has no trainer. Use a recipe.")
    return trainer


def set_variable(plugin: Any, executor: Any, name: str, value: str) -> None:
    """Set an environment variable of the ranks. A value that the executor already has stays, with a warning."""
    current = executor.env_vars.get(name)
    if current is not None and current != value:
        print_warning(
            f"{type(plugin).__name__} does not set {name}={value}, because the executor sets {name}={current}."
        )
        return
    executor.env_vars[name] = value


def warn_without_slurm(plugin: Any, executor: Any, name: str) -> None:
    """Report an argument that isn't its default and has an effect only on Slurm."""
    value = getattr(plugin, name)
    if value != getattr(type(plugin), name):
        kind, owner = type(plugin).__name__, type(executor).__name__
        print_warning(f"{kind}.{name}={value} has no effect on a {owner}, only on a SlurmExecutor.")
