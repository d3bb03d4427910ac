# SPDX-License-Identifier: Apache-2.0
"""Arguments of a function or class: those that a config lacks, and texts in the place of an object."""

from collections.abc import Callable, Mapping
from typing import Any, Optional, get_args

import fiddle as fdl

from nemo2.base.names import nearest
from nemo2.config.typed_text import part_classes, without_annotated
from nemo2.config.value_types import required, takes_a_list, type_hints


def misplaced_text(target: Callable[..., Any], arguments: Mapping[str, Any], *, of: str) -> list[str]:
    """A sentence for each text among these arguments of ``target`` that should be an object, also inside a list."""
    hints = type_hints(target)
    misplaced = [
        (name, text, classes)
        for name, value in arguments.items()
        for text in (value if isinstance(value, list | tuple) and takes_a_list(hints.get(name, Any)) else [value])
        if isinstance(text, str) and (classes := requested_classes(text, hints.get(name, Any)))
    ]
    if not misplaced:
        return []
    from nemo2.config.factories import refusal

    return [f"{of}{name}={text!r}: {refusal(text, classes)}" for name, text, classes in misplaced]


def requested_classes(text: str, hint: Any) -> tuple[type, ...]:
    """The classes of which ``text`` must name one, for a parameter with this annotation.

    Empty: the text may stand for itself. Where a parameter also takes text (``strategy: str | Strategy``), a word in
    capitals that is, or almost is, the name of a factory is meant as this name.
    """
    if classes := part_classes(hint):
        return classes
    classes = tuple(cls for choice in get_args(without_annotated(hint)) for cls in part_classes(choice))
    if not classes or not text[:1].isupper():
        return ()
    from nemo2.config.factories import factory_names, first_word

    return classes if nearest(first_word(text), factory_names(classes)) else ()


def missing_arguments(node: Any, path: str) -> Optional[str]:
    """A clause that names the arguments that the config at ``path`` lacks and its class has no default for. None: it
    lacks none, or it is a live object."""
    if not isinstance(node, fdl.Buildable):
        return None
    target = node.__fn_or_cls__
    missing = [name for name in required(target) if name not in node.__arguments__]
    if not missing:
        return None
    name = getattr(target, "__name__", str(target))
    settings = " and ".join(f"{path}.{one}" for one in missing)
    return f"{path}: {name} has no default for {' and '.join(missing)}. Set {settings}"
