# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show --diff``: what differs between two recipes."""

import sys
from typing import Any

from nemo2.base.place import is_terminal
from nemo2.cli.adapter import Result
from nemo2.cli.new_recipe import docstring
from nemo2.cli.sources import configured

_COLOURS = {"~": "\033[33m", "+": "\033[32m", "-": "\033[31m"}
_RESET = "\033[0m"


def difference(old: str, after: Any, label: str, *, everything: bool, code: bool, exit_code: bool) -> Result:
    """What differs between the recipe ``old`` and the tree ``after``.

    Args:
        label: The name of ``after``.
        everything: Also tell of fields that one recipe sets to the other's default.
        code: Tell it as a Python function that turns one into the other.
        exit_code: Exit with code 1 if they differ in effect.
    """
    from nemo2.config.edits import describe, edits, edits_source

    before = configured(old, [])
    steps = edits(before, after)
    in_effect = [step for step in steps if not step.changes_nothing]
    code_now = int(exit_code and bool(in_effect))
    if code:
        source = edits_source(before, after, doc=docstring(f"{old} as {label}."))
        return Result(None, source.removesuffix("\n"), code_now)
    shown = steps if everything else in_effect
    hidden = len(steps) - len(shown)
    coloured = is_terminal(sys.stdout)
    lines = [f"--- {old}", f"+++ {label}"] if shown else ["no difference in effect" if hidden else "no difference"]
    for mark, line in describe(shown):
        lines.append(f"{_COLOURS[mark]}{mark} {line}{_RESET}" if coloured else f"{mark} {line}")
    if hidden:
        lines.append(f"({hidden} more fields are set to the other's default; show them with --defaults)")
    return Result(_rows(shown), "\n".join(lines), code_now)


def _rows(steps: list[Any]) -> list[dict[str, Any]]:
    from nemo2.config.edits import Unset
    from nemo2.config.show import plain

    def shown(value: Any) -> Any:
        return None if isinstance(value, Unset) else plain(value)

    return [
        {
            "path": step.path,
            "kind": step.kind,
            "old": shown(step.old),
            "new": shown(step.new),
            "in_effect": not step.changes_nothing,
        }
        for step in steps
    ]
