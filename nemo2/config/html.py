# SPDX-License-Identifier: Apache-2.0
"""Shows a recipe in a notebook as a collapsible tree, in HTML without scripts, Graphviz or network access.

`nemo2.config` exports `Config` and `Partial` from this module, so that every config has this view. nemo-run's own
`run.Config` and `run.Partial` get the same view: their picture needs Graphviz, and without it every cell that shows a
config prints an error.
"""

from functools import cache
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run

from nemo2.config.show import Branch, class_name, render, shown_value, tree
from nemo2.config.tree import Config, Partial

_OPEN = 2
"""Levels that are expanded at first."""
_LONGEST = 160


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader

    return Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent)).get_template("tree.html")


def html_tree(node: Any) -> str:
    """The set values of a config and its children, as an HTML element with its style.

    A tooltip shows the line that set each value. A config that is used in two places is shown at the first, and the
    second refers to it.
    """

    def branch(one: Branch) -> dict[str, Any]:
        """``text`` and ``soft`` follow the label, and ``children`` are branches."""
        text, soft, target = "", "", getattr(one.value, "__fn_or_cls__", None)
        if one.first:
            soft = f"same as {one.first}"
        elif isinstance(one.value, fdl.Buildable):
            text, soft = class_name(target), getattr(target, "__module__", "")
        elif one.inside:
            soft = f"{len(one.inside)} of them" if len(one.inside) > 1 else ""
        else:
            text = shown_value(one.value)
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        children = [branch(below) for below in one.inside]
        return {"label": one.label, "tip": one.place, "text": text, "soft": soft, "children": children}

    return _template().render(root=branch(tree(node)), levels=_OPEN)


def _shown_in_ipython(node: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """The text and the tree for IPython."""
    return {"text/plain": render(node), "text/html": html_tree(node)}


for _kind in (Config, Partial, run.Config, run.Partial):
    _kind._repr_mimebundle_ = _shown_in_ipython  # pyright: ignore[reportAttributeAccessIssue]
for _kind in (run.Config, run.Partial):
    # A method, because nemo-run's executors call it.
    _kind._repr_svg_ = lambda _: None  # pyright: ignore[reportAttributeAccessIssue]
