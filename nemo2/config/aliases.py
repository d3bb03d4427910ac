# SPDX-License-Identifier: Apache-2.0
"""Second spellings of parameters: who has which, and what they stand for.

An alias belongs to a class or function and stands for one of its parameters (`ddp_config` for `ddp`) or, in a recipe,
for a path that starts at one (`strategy` of `pretrain` for `trainer.strategy`). The table is keyed by
`"module:qualname"`, so that classes of other packages can have aliases without being imported here.
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

_table: dict[str, dict[str, str]] = {
    "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig": {
        "overlap_grad_sync": "overlap_grad_reduce",
        "overlap_param_sync": "overlap_param_gather",
    },
}
DECIDED_ELSEWHERE: dict[tuple[str, str], str] = {
    (
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
        "grad_reduce_in_fp32",
    ): "trainer.plugins.grad_reduce_in_fp32",
}
"""Fields whose default is another part's value: by class and field, the path of that part from the recipe's root."""

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


def decided_elsewhere(target: Any, name: str) -> str | None:
    """The path, from the recipe's root, of what a field has the value of where it isn't set; None: its class's default."""
    owners = target.__mro__ if isinstance(target, type) else (target,)
    return next((path for owner in owners if (path := DECIDED_ELSEWHERE.get((_key(owner), name)))), None)


def parameter_names(target: Callable[..., Any]) -> list[str]:
    """The parameters of a class or function that can be given by keyword, in order; empty where it has no signature."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _key(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
