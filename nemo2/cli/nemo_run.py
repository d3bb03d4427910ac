# SPDX-License-Identifier: Apache-2.0
"""nemo2's entry points under nemo-run's own command: ``nemo llm pretrain --factory llama_tiny trainer.max_steps=50``.

nemo-run loads this module through the entry-point group ``nemo_run.cli``. Each recipe is a factory with the recipe's
name. Two parts of nemo-run are replaced: its parser refuses some spellings that we document, so
`nemo2.config.apply_overrides` applies overrides; and its `run` exits 0 after a failed run, so our context exits with
the run's code.
"""

import dataclasses
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import fiddle as fdl
import nemo_run
from nemo_run.cli import api
from nemo_run.cli.api import RunContext
from nemo_run.cli.cli_parser import CLIException, parse_cli_args

import nemo2.launch.plugins  # noqa: F401  (whose names it announces)
from nemo2 import recipes
from nemo2.base.errors import ConfigError, SecurityError
from nemo2.base.names import did_you_mean
from nemo2.config import apply_overrides
from nemo2.config.factories import called
from nemo2.config.show import render
from nemo2.config.value_types import required
from nemo2.config.values import typed
from nemo2.config.walk import class_of
from nemo2.hugging_face.api import export_ckpt, import_ckpt
from nemo2.launch import run
from nemo2.launch.trusted_files import refuse_untrusted
from nemo2.llm.api import finetune, generate, pretrain, train, validate
from nemo2.llm.distillation import distill
from nemo2.llm.pruning import prune
from nemo2.llm.quantization import ptq
from nemo2.llm.serving import deploy
from nemo2.recipes.run.executor import torchrun
from nemo2.training.run_dir.environment import redact_text

NAMESPACE = "llm"

_FACTORY = re.compile(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?", re.DOTALL)

COMMANDS = {
    "pretrain": pretrain,
    "finetune": finetune,
    "train": train,
    "validate": validate,
    "generate": generate,
    "import": import_ckpt,
    "export": export_ckpt,
    "distill": distill,
    "prune": prune,
    "ptq": ptq,
    "deploy": deploy,
}
"""The commands behind ``nemo llm``, under NeMo's names."""


class HonestRunContext(RunContext):
    """nemo-run's context for a command, with our overrides and an exit code that shows failures."""

    _as_many_ranks_as_devices = False

    def cli_execute(self, fn: Callable[..., Any], args: list[str], entrypoint_type: Any = "task") -> None:
        """Exit with 1 after an error. In a script that calls ``run.cli.main``, nemo-run prints the error and exits
        0."""
        try:
            super().cli_execute(fn, args, entrypoint_type)
        except Exception as error:
            if not isinstance(error, ConfigError | CLIException):
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
        devices = getattr(getattr(task, "trainer", None), "devices", None)
        if self._as_many_ranks_as_devices and isinstance(devices, int) and devices > 0:
            executor.ntasks_per_node = devices
        plugins = getattr(self, "plugins", None)
        if self.dryrun:
            if executor is not None and not self.direct:
                run(task, executor, name=self.name, dryrun=True, plugins=plugins)
            return
        if not self._should_continue(self.skip_confirmation):
            return
        if executor is None or self.direct:
            if plugins:
                raise ConfigError("run.plugins also edit an executor, but there is none. Set run.executor.")
            fdl.build(task)()
            return
        run(task, executor, name=self.name, detach=self.detach, plugins=plugins)

    def parse_fn(self, fn: Any, args: list[str], **default_kwargs: Any) -> Any:
        """The recipe that ``--factory`` names, or a bare call of ``fn``, with the overrides ``args`` applied.

        Raises:
            ConfigError: an unknown recipe, or invalid overrides. The message lists all of them.
        """
        task = self._recipe(fn)
        if task is None:
            try:
                task = super().parse_fn(fn, [], **default_kwargs)
            except ValueError as error:
                if not str(error).startswith("No matching factory"):
                    raise
                nearest = did_you_mean(str(self.factory), recipes.names())
                raise ConfigError(f"--factory {self.factory}: no such recipe{nearest}") from None
        return apply_overrides(task, args) or task

    def _recipe(self, fn: Any) -> Any:
        """The recipe of ``--factory NAME`` or ``--factory "NAME(argument=value)"``. None: nemo2 has no recipe of this
        name."""
        match = _FACTORY.fullmatch(self.factory.strip()) if isinstance(self.factory, str) else None
        if match is None or match[1] not in recipes.names():
            return None
        module = recipes.get(match[1])
        make = getattr(module, "finetune_recipe" if fn is finetune else "pretrain_recipe", None)
        if make is None or fn not in (pretrain, finetune, train, validate):
            return None
        task = called(make, match[2] or "", fit=typed, name=match[1])
        if fn in (train, validate):
            fdl.update_callable(task, fn)
        return task

    def parse_executor(self, name: str, *args: str) -> Any:
        """The executor of this name, as in nemo-run. The name may also be a function in the script that returns an
        executor instead of a config.

        Raises:
            ConfigError: nothing registered, importable or in the script has this name.
        """
        own = getattr(sys.modules["__main__"], name, None)
        if inspect.isfunction(own) and not required(own):
            executor = own()
            if isinstance(executor, nemo_run.Executor):
                fields = {
                    field.name: getattr(executor, field.name) for field in dataclasses.fields(executor) if field.init
                }
                executor = nemo_run.Config(type(executor), **fields)
            if isinstance(executor, fdl.Buildable) and issubclass(class_of(executor), nemo_run.Executor):
                return parse_cli_args(cast(Any, executor), list(args))
        self._as_many_ranks_as_devices = name == "torchrun" and not any(
            item.startswith("ntasks_per_node=") for item in args
        )
        try:
            return super().parse_executor(name, *args)
        except ValueError:
            raise ConfigError(
                f"run.executor={name}: this executor does not exist. Use torchrun, a function of the script that "
                "returns an executor and requires no argument, or a function that is registered with run.cli.factory."
            ) from None


def _made(executor: Any) -> Any:
    """The executor itself. ``run.cli.main(default_executor=...)`` also accepts a function or a config that makes it."""
    if isinstance(executor, fdl.Buildable):
        return fdl.build(executor)
    return executor() if inspect.isfunction(executor) else executor


def register() -> None:
    """Register the entry points and every recipe with nemo-run. Called once, on import."""
    refuse_untrusted_workspace()
    for name, entry in COMMANDS.items():
        nemo_run.cli.entrypoint(entry, name=name, namespace=NAMESPACE, run_ctx_cls=HonestRunContext)
    nemo_run.cli.factory(torchrun)
    for name in recipes.names():
        module = recipes.get(name)
        nemo_run.cli.factory(_factory(name, module.pretrain_recipe), target=pretrain, name=name)
        if hasattr(module, "finetune_recipe"):
            nemo_run.cli.factory(_factory(name, module.finetune_recipe), target=finetune, name=name)


def refuse_untrusted_workspace() -> None:
    """End this process if nemo-run would run another user's ``workspace.py``, which it looks for in the working
    directory and all folders above.

    Raises:
        SystemExit: nemo-run prints any other error of an entry point and goes on.
    """
    workspace = api._search_workspace_file()
    if workspace is None:
        return
    try:
        refuse_untrusted(Path(workspace), effect="nemo-run runs it")
    except SecurityError as error:
        raise SystemExit(f"error: {error} INCLUDE_WORKSPACE_FILE=false tells nemo-run to run none.") from None


def _factory(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory function for the recipe. It must be a plain function, because nemo-run reads its module and
    signature."""

    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    factory.__name__ = factory.__qualname__ = name
    return factory


register()
