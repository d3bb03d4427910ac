# SPDX-License-Identifier: Apache-2.0
"""A plugin that logs a run to Weights & Biases."""

import functools
import os
from dataclasses import dataclass
from typing import Any

import fiddle as fdl
import nemo_run

from nemo2.base.advice import print_warning
from nemo2.base.errors import ConfigError
from nemo2.config.show import plain


@dataclass(kw_only=True)
class WandbPlugin(nemo_run.Plugin):
    """Set ``log.wandb`` if WANDB_API_KEY is set, and pass the key to the ranks as a secret. Without the key, report
    that nothing changes.

    Args:
        name: The run's name in Weights & Biases.
        logger_fn: The function that makes the logger's config from ``name``, such as
            `nemo2.recipes.log.default.wandb_logger`.
        log_task_config: Attach the recipe to the run.
    """

    name: str
    logger_fn: Any
    log_task_config: bool = True

    def __post_init__(self) -> None:
        if isinstance(factory := self.logger_fn, functools.partial):  # an experiment writes its plugins as JSON
            self.logger_fn = nemo_run.Partial(factory.func, *factory.args, **factory.keywords)

    def setup(self, task: Any, executor: Any) -> None:
        """Set the logger.

        Raises:
            ConfigError: the task has no ``log``.
        """
        log = getattr(task, "log", None)
        if log is None:
            raise ConfigError("WandbPlugin sets log.wandb, but this task has no log. Use a recipe.")
        key = os.environ.get("WANDB_API_KEY")
        if key is None:
            print_warning("WandbPlugin: WANDB_API_KEY is not set, so log.wandb is not changed.")
            return
        shown = plain(task) if self.log_task_config else None
        make: Any = fdl.build(self.logger_fn) if isinstance(self.logger_fn, fdl.Buildable) else self.logger_fn
        log.wandb = make(name=self.name)
        if shown is not None:
            log.wandb.config = shown
        executor.env_vars.setdefault("WANDB_API_KEY", key)
