# SPDX-License-Identifier: Apache-2.0
"""The entry points as nemo-run's commands: a script's ``run.cli.main(llm.pretrain)`` finds recipes, parts and overrides.

nemo-run asks a function for its ``cli_entrypoint``. Here that is a placeholder, which has nemo2's commands registered when
somebody looks at it, as nemo-run itself has for ``nemo llm ...``: an import of ``llm`` costs nothing for it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_COMMANDS = "nemo2.cli.nemo_run"
"""The module above this one that registers all of them, named in the entry-point group ``nemo_run.cli`` too."""


class _Registered:
    """A function's command: the first look registers it, in this placeholder's stead."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__dict__["function"] = function

    def __getattr__(self, name: str) -> Any:
        import_module(_COMMANDS)
        command = self.__dict__["function"].cli_entrypoint
        if command is self:
            raise AttributeError(name)
        return getattr(command, name)


def command(function: Callable[..., Any]) -> None:
    """Have nemo-run find ``function``, an entry point that `nemo2.cli.nemo_run` registers."""
    function.cli_entrypoint = _Registered(function)  # pyright: ignore[reportFunctionMemberAccess]
