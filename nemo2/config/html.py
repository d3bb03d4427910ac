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

from nemo2.config.tree import Config, Partial
from nemo2.config.walk import place_of

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
    from nemo2.config.show import effective_children, holds_configs, shown_value

    first: dict[int, str] = {}

    def branch(label: str, value: Any, path: str, tip: str) -> dict[str, Any]:
        """``text`` and ``soft`` follow the label, and ``children`` are branches."""
        if id(value) in first:
            return {"label": label, "tip": tip, "soft": f"same as {first[id(value)]}"}
        text, soft = "", ""
        if isinstance(value, fdl.Buildable):
            first[id(value)] = path or "the recipe"
            target = value.__fn_or_cls__
            text, soft = getattr(target, "__qualname__", str(target)), getattr(target, "__module__", "")
        elif holds_configs(value):
            soft = f"{len(value)} of them" if len(value) > 1 else ""
        else:
            text = shown_value(value)
            return {"label": label, "tip": tip, "text": text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."}
        children = [
            branch(step.strip(".[]"), child, f"{path}{step}".removeprefix("."), _who(value, step))
            for step, child in effective_children(value, defaults=False)
        ]
        return {"label": label, "tip": tip, "text": text, "soft": soft, "children": children}

    return _template().render(root=branch("", node, "", ""), levels=_OPEN)


def _who(node: Any, step: str) -> str:
    """The ``file:line`` that set a field last. "": an item of a list."""
    if not isinstance(node, fdl.Buildable) or not step.startswith("."):
        return ""
    return place_of(node, step[1:])


def _shown_in_ipython(node: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """The text and the tree for IPython."""
    from nemo2.config.show import render

    return {"text/plain": render(node), "text/html": html_tree(node)}


for _kind in (Config, Partial, run.Config, run.Partial):
    _kind._repr_mimebundle_ = _shown_in_ipython  # pyright: ignore[reportAttributeAccessIssue]
for _kind in (run.Config, run.Partial):
    # A method, because nemo-run's executors call it.
    _kind._repr_svg_ = lambda _: None  # pyright: ignore[reportAttributeAccessIssue]
