# SPDX-License-Identifier: Apache-2.0
"""Aliases of parameters: their owners and the parameters that they stand for.

An alias belongs to a class or function. It stands for a parameter (`ddp_config` for `ddp`) or, in a recipe, for a path
that starts at a parameter (`strategy` of `pretrain` for `trainer.strategy`). The key of the table is
`"module:qualname"`, so that classes of other packages can have aliases without being imported here.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_table: dict[str, dict[str, str]] = {
    "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig": {
        "overlap_grad_sync": "overlap_grad_reduce",
        "overlap_param_sync": "overlap_param_gather",
    },
}


class Elsewhere(NamedTuple):
    """The part of a recipe that decides an unset field: the part's path from the root ("": the config itself), and a
    function that reads the value from it. ``read`` returns `NOT_HERE` if the class's default applies."""

    path: str
    read: Callable[[Any], Any]


NOT_HERE = object()
DECIDED_ELSEWHERE: dict[str, dict[str, Elsewhere]] = {}
"""The deciding part by class and field; see `register_elsewhere`."""

_TEXT_FORMS: dict[str, dict[str, Callable[[str], Any]]] = {}
"""For each class, the parameters whose texts stand for a config; see `register_text_form`."""

_GONE: dict[str, dict[str, str | Callable[[], str]]] = {}
"""For each class or function, names from NeMo 2.0's scripts that it lacks, with the reason."""

_resolved: "weakref.WeakKeyDictionary[Any, dict[str, str]]" = weakref.WeakKeyDictionary()


def register_aliases(target: Callable[..., Any] | str, /, **aliases: str) -> None:
    """Add `alias="parameter"` names to a class or function, or to a `"module:qualname"`, which is not imported.

    Subclasses inherit the aliases. Registering an alias again replaces its meaning.

    Args:
        target: The class or function, or its `"module:qualname"`.

    Raises:
        TypeError: the target is loaded, and an alias is the name of a parameter or stands for none.
    """
    if not isinstance(target, str):
        names = parameter_names(target)
        for alias, real in aliases.items():
            if alias in names:
                raise TypeError(
                    f"{target.__qualname__} has a parameter {alias!r}, so this name cannot be an alias too."
                )
            if real.split(".")[0] not in names:
                raise TypeError(f"{target.__qualname__} has no parameter {real!r} for the alias {alias!r}.")
    _table.setdefault(target if isinstance(target, str) else _key(target), {}).update(aliases)
    _resolved.clear()


def aliases_of(target: Callable[..., Any]) -> dict[str, str]:
    """The aliases of a class or function, with those of base classes, and the parameter or dotted path of each.

    An inherited alias that the signature no longer supports is left out.

    Args:
        target: The class or function.
    """
    try:
        return dict(_resolved[target])
    except (KeyError, TypeError):
        pass
    aliases: dict[str, str] = {}
    for owner in reversed(target.__mro__) if isinstance(target, type) else (target,):
        aliases.update(_table.get(_key(owner), {}))
    if aliases:
        names = parameter_names(target)
        aliases = {alias: real for alias, real in aliases.items() if alias not in names and real.split(".")[0] in names}
    with contextlib.suppress(TypeError):  # not weakly referable, so computed each time
        _resolved[target] = aliases
    return dict(aliases)


def register_gone(target: Callable[..., Any] | str, /, **reasons: str | Callable[[], str]) -> None:
    """Register names that NeMo 2.0 accepts and this class or function (or ``"module:qualname"``) lacks.

    Each has a sentence that names its replacement. The error for such a name contains the sentence instead of similar
    names. A sentence that depends on its reader is a function.
    """
    _GONE.setdefault(target if isinstance(target, str) else _key(target), {}).update(reasons)


def gone(target: Any, name: str) -> str | None:
    """The sentence of `register_gone`, also of a base class. None: the name isn't registered."""
    reason = _inherited(_GONE, target, name)
    return str(reason()) if callable(reason) else reason


def register_elsewhere(owner: str, path: str, **readings: Callable[[Any], Any]) -> None:
    """Register fields of ``owner`` (``"module:qualname"``, which is not imported) and its subclasses that another part
    of a recipe decides if they are unset.

    ``path`` is that part's path; "" is the config that has the field. Each field has a function that reads its value
    from the part.
    """
    parts = {name: Elsewhere(path, read) for name, read in readings.items()}
    DECIDED_ELSEWHERE.setdefault(owner, {}).update(parts)


def decided_elsewhere(target: Any, name: str) -> Elsewhere | None:
    """The part that decides a field that isn't set. None: the class's default applies."""
    elsewhere = _inherited(DECIDED_ELSEWHERE, target, name)
    return elsewhere if elsewhere is not None and name in parameter_names(target) else None


def register_text_form(target: str, /, **forms: Callable[[str], Any]) -> None:
    """Register parameters of a class (``"module:qualname"``, which is not imported) and its subclasses that take a text
    in place of a config. In a recipe, such a field reads as the config.

    Each parameter has a function that returns the config for a text, or None for a text that stands for none.
    """
    _TEXT_FORMS.setdefault(target, {}).update(forms)


def text_form(target: Any, name: str) -> Callable[[str], Any] | None:
    """The function of `register_text_form`, also of a base class. None: texts are plain values."""
    return _inherited(_TEXT_FORMS, target, name)


@functools.lru_cache(maxsize=1024)
def parameter_names(target: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a class or function that can be passed by keyword, in order. Empty without a signature."""
    by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return tuple(name for name, value in parameters_of(target).items() if value.kind in by_keyword)


@functools.lru_cache(maxsize=1024)
def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function, in order. Without a signature, as of ``dict``: any keywords."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {"": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def _inherited(table: Mapping[str, Mapping[str, Any]], target: Any, name: str) -> Any:
    """What a table has for a name of a class or function, or of a base class. None: nothing."""
    keys = _keys_of_bases(target) if isinstance(target, type) else (_key(target),)
    return next((found for key in keys if key in table and (found := table[key].get(name))), None)


@functools.lru_cache(maxsize=1024)
def _keys_of_bases(cls: type) -> tuple[str, ...]:
    return tuple(map(_key, cls.__mro__))


def _key(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
