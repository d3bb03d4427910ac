# SPDX-License-Identifier: Apache-2.0
"""Second spellings of parameters: who has which, and what they stand for.

An alias belongs to a class or function and stands for one of its parameters (`ddp_config` for `ddp`) or, in a recipe,
for a path that starts at one (`strategy` of `pretrain` for `trainer.strategy`). The table is keyed by
`"module:qualname"`, so that classes of other packages can have aliases without being imported here.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

_table: dict[str, dict[str, str]] = {
    "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig": {
        "overlap_grad_sync": "overlap_grad_reduce",
        "overlap_param_sync": "overlap_param_gather",
    },
}


class Elsewhere(NamedTuple):
    """Where the value of an unset field is decided: the path of that part from the recipe's root, and its reading of the part
    there. ``read`` gives `NOT_HERE` where the class's default holds after all."""

    path: str
    read: Callable[[Any], Any]


NOT_HERE = object()
DECIDED_ELSEWHERE: dict[tuple[str, str], Elsewhere] = {}
"""By class and field; see `register_elsewhere`."""

_GONE: dict[str, dict[str, str]] = {}
"""Why a class or function, by its key, has no parameter of a name that NeMo 2.0's scripts give it."""

_resolved: "weakref.WeakKeyDictionary[Any, dict[str, str]]" = weakref.WeakKeyDictionary()


def register_aliases(target: Callable[..., Any] | str, /, **aliases: str) -> None:
    """Add `alias="parameter"` spellings to a class or function, or to a `"module:qualname"` that needs no import.

    Subclasses inherit them. Registering an alias again replaces what it stood for.

    Raises:
        TypeError: the target is loaded and an alias is the name of a parameter, or stands for none.
    """
    if not isinstance(target, str):
        names = parameter_names(target)
        for alias, real in aliases.items():
            if alias in names:
                raise TypeError(f"{target.__qualname__} has a parameter {alias!r}: it can't be an alias too.")
            if real.split(".")[0] not in names:
                raise TypeError(f"{target.__qualname__} has no parameter {real!r} for the alias {alias!r}.")
    _table.setdefault(target if isinstance(target, str) else _key(target), {}).update(aliases)
    _resolved.clear()


def aliases_of(target: Callable[..., Any]) -> dict[str, str]:
    """Alias to parameter (or dotted path) for a class or function, with those inherited from base classes.

    An inherited alias that the signature no longer supports is left out.
    """
    try:
        return dict(_resolved[target])
    except (KeyError, TypeError):
        pass
    found: dict[str, str] = {}
    for owner in reversed(target.__mro__) if isinstance(target, type) else (target,):
        found.update(_table.get(_key(owner), {}))
    if found:
        names = parameter_names(target)
        found = {alias: real for alias, real in found.items() if alias not in names and real.split(".")[0] in names}
    with contextlib.suppress(TypeError):  # not weakly referable: computed each time
        _resolved[target] = found
    return dict(found)


def register_gone(target: Callable[..., Any] | str, /, **reasons: str) -> None:
    """Names that NeMo 2.0 takes or swallows and this class or function (or ``"module:qualname"``) doesn't have, each with a
    sentence on what does its work. The error for such a name says it, in place of names that look alike."""
    _GONE.setdefault(target if isinstance(target, str) else _key(target), {}).update(reasons)


def gone(target: Any, name: str) -> str | None:
    """The sentence of `register_gone`, of a base class too; None: nothing is known of this name."""
    owners = target.__mro__ if isinstance(target, type) else (target,)
    return next((told for owner in owners if (told := _GONE.get(_key(owner), {}).get(name))), None)


def register_elsewhere(owner: str, path: str, **readings: Callable[[Any], Any]) -> None:
    """Fields of ``owner`` (``"module:qualname"``, which needs no import) and its subclasses that the part at ``path`` of a recipe
    decides where they aren't set, each with the reading of that part."""
    DECIDED_ELSEWHERE.update({(owner, name): Elsewhere(path, read) for name, read in readings.items()})


def decided_elsewhere(target: Any, name: str) -> Elsewhere | None:
    """The decider of a field that isn't set; None: its class's default holds."""
    owners = target.__mro__ if isinstance(target, type) else (target,)
    found = next((where for owner in owners if (where := DECIDED_ELSEWHERE.get((_key(owner), name)))), None)
    return found if found is not None and name in parameter_names(target) else None


def parameter_names(target: Callable[..., Any]) -> list[str]:
    """The parameters of a class or function that can be given by keyword, in order; empty where it has no signature."""
    return list(_parameter_names(target))


@functools.lru_cache(maxsize=1024)
def _parameter_names(target: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _key(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
