# SPDX-License-Identifier: Apache-2.0
"""The recipe tree: configs that can be edited, printed, compared, sent to another machine and built.

`configurable` costs nothing to import; the names that need fiddle and nemo-run are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo2.config.capture import aliases_of, captured_arguments, configurable, register_aliases
    from nemo2.config.checks import check_serialisable
    from nemo2.config.overrides import apply_overrides
    from nemo2.config.serialize import from_json, to_json, to_yaml
    from nemo2.config.show import diff, flatten, render
    from nemo2.config.tree import Config, Partial
    from nemo2.config.walk import select, who_set

__all__ = [
    "Config",
    "Partial",
    "aliases_of",
    "apply_overrides",
    "captured_arguments",
    "check_serialisable",
    "configurable",
    "diff",
    "flatten",
    "from_json",
    "register_aliases",
    "render",
    "select",
    "to_json",
    "to_yaml",
    "who_set",
]

_HOMES = {
    "capture": ("aliases_of", "captured_arguments", "configurable", "register_aliases"),
    "overrides": ("apply_overrides",),
    "serialize": ("from_json", "to_json", "to_yaml"),
    "show": ("diff", "flatten", "render"),
    "checks": ("check_serialisable",),
    "tree": ("Config", "Partial"),
    "walk": ("select", "who_set"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
