# SPDX-License-Identifier: Apache-2.0
"""The entry points as nemo-run's commands, so that a script's ``run.cli.main(llm.pretrain)`` finds recipes, parts and
overrides.

nemo-run reads a function's ``cli_entrypoint``. Here that is a placeholder that registers nemo2's commands on first use,
as nemo-run itself does for ``nemo llm ...``. An import of ``llm`` therefore costs nothing for it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_COMMANDS = "nemo2.cli.nemo_run"
"""The higher module that registers all commands, which is also named in the entry-point group ``nemo_run.cli``."""


class _Registered:
    """A function's command. The first access registers it and replaces this placeholder."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__dict__["function"] = function

    def __getattr__(self, name: str) -> Any:
        import_module(_COMMANDS)
        command = self.__dict__["function"].cli_entrypoint
        if command is self:
            raise AttributeError(name)
        return getattr(command, name)


def command(function: Callable[..., Any]) -> None:
    """Let nemo-run find ``function``, an entry point that `nemo2.cli.nemo_run` registers."""
    function.cli_entrypoint = _Registered(function)  # pyright: ignore[reportFunctionMemberAccess]
