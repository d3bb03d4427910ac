# SPDX-License-Identifier: Apache-2.0
"""nemo2's entry points under nemo-run's own command: ``nemo llm pretrain --factory llama_tiny trainer.max_steps=50``.

Loaded by nemo-run through the entry-point group ``nemo_run.cli``. Each recipe is a factory of its own name. Overrides are
applied by `nemo2.config.apply_overrides`, which types them by the signatures they set, and a run that fails makes the
command fail: nemo-run's own parser refuses some spellings we document, and its `run` exits 0 whatever happened.
"""

import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import fiddle as fdl
import nemo_run
from nemo_run.cli.api import RunContext

import nemo2.plugins  # noqa: F401  (whose names it announces)
from nemo2 import recipes
from nemo2.config import apply_overrides
from nemo2.config.show import render
from nemo2.errors import ConfigError
from nemo2.launch import run
from nemo2.llm.api import finetune, generate, pretrain, train, validate
from nemo2.names import did_you_mean
from nemo2.run_dir.environment import redact_text

NAMESPACE = "llm"

_FACTORY = re.compile(r"^[A-Za-z_]\w*$")


class HonestRunContext(RunContext):
    """nemo-run's context for a command, with our overrides and with an end that tells the truth."""

    def cli_execute(self, fn: Callable[..., Any], args: list[str], entrypoint_type: Any = "task") -> None:
        """nemo-run prints an error and exits 0 where a script calls ``run.cli.main``; here it exits 1."""
        try:
            super().cli_execute(fn, args, entrypoint_type)
        except Exception as error:
            if not isinstance(error, ConfigError):
                traceback.print_exc()
            print(f"error: {redact_text(str(error))}", file=sys.stderr)
            raise SystemExit(1) from None

    def _execute_task(self, fn: Callable[..., Any], task_args: list[str]) -> None:
        if self.repl or any((self.to_yaml, self.to_toml, self.to_json)):
            super()._execute_task(fn, task_args)
            return
        task = self.parse_fn(fn, task_args)
        print(render(task))
        executor = _made(getattr(self, "executor", None))
        plugins = getattr(self, "plugins", None)
        if self.dryrun:
            if executor is not None and not self.direct:
                run(task, executor, name=self.name, dryrun=True, plugins=plugins)
            return
        if not self._should_continue(self.skip_confirmation):
            return
        if executor is None or self.direct:
            if plugins:
                raise ConfigError("run.plugins edit an executor too, and there is none: set run.executor.")
            fdl.build(task)()
            return
        run(task, executor, name=self.name, detach=self.detach, plugins=plugins)

    def parse_fn(self, fn: Any, args: list[str], **default_kwargs: Any) -> Any:
        """The recipe that ``--factory`` names, or a bare call of ``fn``, with the overrides ``args`` applied.

        Raises:
            ConfigError: an unknown recipe, or overrides that don't fit; all of them are named.
        """
        if isinstance(self.factory, str) and _FACTORY.match(self.factory):
            known = recipes.names()
            if self.factory not in known:
                raise ConfigError(f"--factory {self.factory}: no such recipe{did_you_mean(self.factory, known)}")
        task = super().parse_fn(fn, [], **default_kwargs)
        return apply_overrides(task, args) or task


def _made(executor: Any) -> Any:
    """An executor; ``run.cli.main(default_executor=...)`` may be given a function or a config that makes it."""
    if isinstance(executor, fdl.Buildable):
        return fdl.build(executor)
    return executor() if inspect.isfunction(executor) else executor


def register() -> None:
    """Tell nemo-run of the entry points and of every recipe. Called once, on import."""
    for entry in (pretrain, finetune, train, validate, generate):
        nemo_run.cli.entrypoint(entry, namespace=NAMESPACE, run_ctx_cls=HonestRunContext)
    for name in recipes.names():
        module = recipes.get(name)
        nemo_run.cli.factory(_factory(name, module.pretrain_recipe), target=pretrain, name=name)
        if hasattr(module, "finetune_recipe"):
            nemo_run.cli.factory(_factory(name, module.finetune_recipe), target=finetune, name=name)


def _factory(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """The recipe's own factory function; a plain function, because nemo-run asks for its module and signature."""

    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    factory.__name__ = factory.__qualname__ = name
    return factory


register()
