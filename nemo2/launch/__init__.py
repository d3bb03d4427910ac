# SPDX-License-Identifier: Apache-2.0
"""Starting runs: a recipe on this machine or a cluster through nemo-run, with an honest end."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo2.launch.failure import RankFailure
    from nemo2.launch.launcher import RunResult, launch, run

_HOMES = {"RankFailure": "failure", "RunResult": "launcher", "launch": "launcher", "run": "launcher"}

__all__ = ["RankFailure", "RunResult", "launch", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
