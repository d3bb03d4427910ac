# SPDX-License-Identifier: Apache-2.0
"""Shows a recipe in a notebook as a collapsible tree, in HTML without scripts, Graphviz or network access.

`nemo2.config` exports `Config` and `Partial` from this module, so that every config has this view. nemo-run's own
`run.Config` and `run.Partial` get the same view: their picture needs Graphviz, and without it every cell that shows a
config prints an error.
"""

from html import escape
from typing import Any

import fiddle as fdl
import nemo_run as run

from nemo2.config.show import effective_children, holds_configs, render, shown_value
from nemo2.config.tree import Config, Partial
from nemo2.config.walk import place_of

_OPEN = 2
"""Levels that are expanded at first."""
_LONGEST = 160
_STYLE = (
    "<style>.nemo2-tree{font:13px/1.5 ui-monospace,monospace;overflow-wrap:anywhere}"
    ".nemo2-tree details,.nemo2-tree div{margin-left:1.2em}"
    ".nemo2-tree>details,.nemo2-tree>div{margin-left:0}.nemo2-tree summary{cursor:pointer}"
    ".nemo2-tree i{font-style:normal;opacity:.62}.nemo2-tree b{font-weight:600}</style>"
)


def html_tree(node: Any) -> str:
    """The set values of a config and its children, as an HTML element with its style.

    A tooltip shows the line that set each value. A config that is used in two places is shown at the first, and the
    second refers to it.
    """
    return f'{_STYLE}<div class="nemo2-tree">{_Tree().shown("", node, "", 0, "")}</div>'


class _Tree:
    def __init__(self) -> None:
        self.first: dict[int, str] = {}

    def shown(self, label: str, value: Any, path: str, depth: int, who: str) -> str:
        name = f"<b>{escape(label)}</b> " if label else ""
        tip = f' title="{escape(who)}"' if who else ""
        if isinstance(value, fdl.Buildable):
            if id(value) in self.first:
                return f"<div{tip}>{name}<i>same as {escape(self.first[id(value)])}</i></div>"
            self.first[id(value)] = path or "the recipe"
            target = value.__fn_or_cls__
            where = f" <i>{escape(getattr(target, '__module__', '') or '')}</i>"
            head = f"{name}{escape(getattr(target, '__qualname__', str(target)))}{where}"
        elif holds_configs(value):
            head = f"{name}<i>{len(value)} of them</i>" if len(value) > 1 else name
        else:
            text = shown_value(value)
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
            return f"<div{tip}>{name}{escape(text)}</div>"
        inner = "".join(
            self.shown(_label(step), child, f"{path}{step}".removeprefix("."), depth + 1, _who(value, step))
            for step, child in effective_children(value, defaults=False)
        )
        if not inner:
            return f"<div{tip}>{head}</div>"
        opened = " open" if depth < _OPEN else ""
        return f"<details{opened}><summary{tip}>{head}</summary>{inner}</details>"


def _label(step: str) -> str:
    return step.removeprefix(".") if step.startswith(".") else step.strip("[]")


def _who(node: Any, step: str) -> str:
    """The ``file:line`` that set a field last. "": an item of a list."""
    if not isinstance(node, fdl.Buildable) or not step.startswith("."):
        return ""
    return place_of(node, step[1:])


def _shown_in_ipython(node: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """The text and the tree for IPython."""
    return {"text/plain": render(node), "text/html": html_tree(node)}


for _kind in (Config, Partial, run.Config, run.Partial):
    _kind._repr_mimebundle_ = _shown_in_ipython  # pyright: ignore[reportAttributeAccessIssue]
for _kind in (run.Config, run.Partial):
    # A method, because nemo-run's executors call it.
    _kind._repr_svg_ = lambda _: None  # pyright: ignore[reportAttributeAccessIssue]
