# SPDX-License-Identifier: Apache-2.0
"""Applies nemo-run plugins (``run.Plugin``) before the checks, so that the checks cover the plugins' changes.

nemo-run 0.11 instead checks a task before its plugins change it, and ignores plugins without an executor.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Union

import fiddle as fdl
import nemo_run

from nemo2.base.errors import ConfigError
from nemo2.config.factories import made_by_name
from nemo2.config.show import diff, format_value
from nemo2.config.typed_text import WrongType, split_items
from nemo2.config.values import typed
from nemo2.launch.executor_fields import mistyped_fields
from nemo2.launch.executor_ranks import launcher_of
from nemo2.launch.local import split_secrets

Plugins = Union[None, Any, Sequence[Any]]
"""A plugin, its config or its name with arguments, or a list of these."""


def build_plugins(plugins: Plugins) -> list[Any]:
    """Plugins from any of their forms.

    Raises:
        ConfigError: an unknown name, or an object that is not a plugin.
    """
    items = [] if plugins is None else plugins if isinstance(plugins, list | tuple) else [plugins]
    return [_build(item) for item in items]


def split_plugins(texts: Iterable[str]) -> list[str]:
    """The plugins of ``--plugins A(x=1),B`` and of ``--plugins A --plugins B``, each name with its arguments."""
    return [part.strip() for text in texts for part in split_items(text) if part.strip()]


def apply_plugins(plugins: Sequence[Any], recipe: Any, executor: Any, *, experiment_id: str) -> list[str]:
    """Let each plugin edit the recipe and the executor in turn. Returns a line per change, with the plugin's name."""
    changes: list[str] = []
    for plugin in plugins:
        before, settings_before = copy.deepcopy(recipe), _settings(executor)
        plugin.assign(experiment_id)
        plugin.setup(recipe, executor)
        name = type(plugin).__name__
        changes += [f"{name}: {change.path}={format_value(change.new)}" for change in diff(before, recipe)]
        changes += [
            f"{name}: {key}={value}" for key, value in _settings(executor).items() if value != settings_before.get(key)
        ]
    return changes


def _build(plugin: Any) -> Any:
    if isinstance(plugin, str):
        try:
            plugin = made_by_name(plugin, (nemo_run.Plugin,), fit=typed)
        except WrongType as error:
            raise ConfigError(f"plugins: {plugin!r} {error}") from None
    if isinstance(plugin, fdl.Buildable):
        plugin = fdl.build(plugin)
    if not isinstance(plugin, nemo_run.Plugin):
        raise ConfigError(
            f"plugins: {plugin!r} is not a plugin. Derive it from nemo_run.Plugin, whose method setup(task, executor) "
            "edits both."
        )
    if problems := mistyped_fields(plugin, type(plugin).__name__):
        raise ConfigError("\n".join(problems))
    return plugin


def _settings(executor: Any) -> dict[str, str]:
    """The settings of an executor and its launcher, and its variables by name, without the values of secrets."""
    launcher = launcher_of(executor)
    plain, secret = split_secrets(executor.env_vars)
    return {
        **{
            f"executor.{name}": value
            for name, value in _fields(executor).items()
            if name not in ("env_vars", "launcher")
        },
        "executor.launcher": type(launcher).__name__,
        **{f"executor.launcher.{name}": value for name, value in _fields(launcher).items()},
        **plain,
        **dict.fromkeys(secret, "***"),
    }


def _fields(owner: Any) -> dict[str, str]:
    names = [field.name for field in fields(owner) if not field.name.startswith("_")]
    return {name: repr(getattr(owner, name, None)) for name in names}
