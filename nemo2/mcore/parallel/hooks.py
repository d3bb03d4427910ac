# SPDX-License-Identifier: Apache-2.0
"""Hooks into the parts of a step that Lightning doesn't see: the schedule and its micro-batches.

Every callback, data module, data sampler, optimizer module and model that defines one of these methods is called. A method
receives only the arguments that it names.

======================================== ==============================================================================
hook                                     arguments
======================================== ==============================================================================
on_megatron_step_start                   step; may return another step, which then runs
on_megatron_microbatches_start           step
on_megatron_microbatch_start             step, batch, forward_callback
on_megatron_microbatch_end               step, batch, forward_callback, output
on_megatron_microbatches_end             step, microbatch_outputs
on_megatron_reduce_microbatches_start    step, microbatch_outputs
on_megatron_reduce_microbatches_end      step, microbatch_outputs, loss_reduction, reduced
on_megatron_step_end                     step, microbatch_outputs, reduced
======================================== ==============================================================================
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Optional, TypeVar

HOOKS = (
    "on_megatron_step_start",
    "on_megatron_microbatches_start",
    "on_megatron_microbatch_start",
    "on_megatron_microbatch_end",
    "on_megatron_microbatches_end",
    "on_megatron_reduce_microbatches_start",
    "on_megatron_reduce_microbatches_end",
    "on_megatron_step_end",
)

T = TypeVar("T")


class CallbackConnector:
    """The registry of listeners by hook. A hook without listeners costs a dictionary lookup. A method that is replaced on
    a registered object is called in its new form."""

    def __init__(self, callbacks: "Any" = None) -> None:
        self._objects: list[Any] = []
        self.callbacks: dict[str, list[Any]] = {}
        """The registered objects by hook, in the order of their calls."""
        if callbacks:
            self.add(*callbacks)

    def add(self, *callbacks: Any) -> "CallbackConnector":
        """Register each object for the hooks that it defines, once. The objects of another connector are added."""
        for callback in callbacks:
            if isinstance(callback, CallbackConnector):
                self.add(*callback._objects)
                continue
            if callback is None or any(callback is item for item in self._objects):
                continue
            names = [name for name in HOOKS if callable(getattr(callback, name, None))]
            if names:
                self._objects.append(callback)
            for name in names:
                self.callbacks.setdefault(name, []).append(callback)
        return self

    def listening(self, *names: str) -> list[str]:
        """The classes that define one of these hooks."""
        return [
            type(one).__name__ for one in self._objects if any(callable(getattr(one, name, None)) for name in names)
        ]

    def event(self, name: str, **arguments: Any) -> None:
        for callback in self.callbacks.get(name, ()):
            _call(getattr(callback, name), arguments)

    def transform_event(self, name: str, value: T, **arguments: Any) -> T:
        """Each listener may return a replacement for ``value``. None leaves it unchanged."""
        for callback in self.callbacks.get(name, ()):
            replacement = _call(getattr(callback, name), {"step": value, **arguments})
            if replacement is not None:
                value = replacement
        return value

    def __contains__(self, callback: Any) -> bool:
        return any(callback is item for item in self._objects)

    def __add__(self, other: "CallbackConnector") -> "CallbackConnector":
        return CallbackConnector().add(self, other)

    def __iadd__(self, other: "CallbackConnector") -> "CallbackConnector":
        return self.add(other)


def _call(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a hook with those of the arguments that it names."""
    names = _named_arguments(getattr(method, "__func__", method))
    return method(**(arguments if names is None else {name: arguments[name] for name in names if name in arguments}))


@functools.lru_cache(maxsize=256)
def _named_arguments(function: Callable[..., Any]) -> Optional[tuple[str, ...]]:
    """The names of a function's parameters. None: it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)
