# SPDX-License-Identifier: Apache-2.0
"""`@configurable`: closed signatures, aliases of parameters, and live objects that record their arguments.

A user writes `recipe.trainer.callbacks.append(MyCallback(every=10))`. The callback is a live object, but the recipe
must be able to travel to another machine as text. A configurable class therefore records the arguments of each
instance, and the recipe tree turns the instance back into a config when needed. This module imports neither torch nor
fiddle nor nemo-run.
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast, overload

from nemo2.base.errors import ConfigError, UnknownNameError
from nemo2.base.names import did_you_mean
from nemo2.config.aliases import aliases_of, gone, parameter_names, parameters_of, register_aliases
from nemo2.config.dtypes import read_dtype
from nemo2.config.provenance import Call, is_same, line_of_caller, note_call, note_own_changes, record_of

_T = TypeVar("_T", bound=Callable[..., Any])
_WRAPPED = "__nemo2_configurable__"
_MAX_COMPARED_ITEMS = 10_000


@overload
def configurable(target: _T, /) -> _T: ...
@overload
def configurable(**aliases: str) -> Callable[[_T], _T]: ...
def configurable(target: Any = None, /, **aliases: str) -> Any:
    """Make a class or function usable in recipes. Use it without arguments or as `@configurable(alias="parameter")`.

    The signature does not change. Calls accept the aliases too. An unknown keyword raises an error with the nearest
    names, and so does an argument of a function that isn't of its type. Instances of a class record their arguments
    (`captured_arguments`). Subclasses are configurable as well;
    decorate them only to add aliases or to have their signature checked. Put the decorator above `@dataclass`.

    A dotted alias (`strategy="trainer.strategy"`) exists in recipes only, where the path leads through sub-configs.

    Args:
        target: The class or function. None: the call returns a decorator.

    Raises:
        TypeError: the signature has `*args` or `**kwargs`, which would hide typing errors, or an alias stands for no
            parameter.
    """
    if target is None:
        return lambda decorated: configurable(decorated) if not aliases else _decorate(decorated, aliases)
    return _decorate(target, aliases)


def is_configurable(target: object) -> bool:
    """Whether a class (or a base class of it) or a function was decorated with `@configurable`."""
    if isinstance(target, type):
        return any(getattr(base.__dict__.get("__init__"), _WRAPPED, False) for base in target.__mro__)
    return bool(getattr(target, _WRAPPED, False))


def captured_arguments(obj: object) -> dict[str, Any] | None:
    """The keyword arguments that rebuild `obj`. None: the object's class isn't configurable.

    Only arguments that were passed, under their real names. The values are the passed objects, not copies.

    Args:
        obj: An object of a configurable class, or any other object.
    """
    call = record_of(obj).call
    return None if call is None or call.arguments is None else dict(call.arguments)


def is_being_made(obj: object) -> bool:
    """Whether the constructor of a configurable object, or of a subclass, is still running."""
    call = record_of(obj).call
    return call is not None and call.arguments is None


def recapture(obj: object, name: str, value: Any) -> None:
    """Record a new value of an argument that the class allows to be set after construction."""
    call = record_of(obj).call
    if call is not None and call.arguments is not None:
        note_call(obj, Call(call.place, call.arguments | {name: value}, _plain_attributes(obj)))


def made_at(obj: object) -> tuple[str, int] | None:
    """The file and line that constructed a captured object. None for any other object."""
    call = record_of(obj).call
    return None if call is None else call.place


def changed_since_made(obj: object, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """The public attributes of an object that its arguments don't explain. Empty: all attributes follow from the
    arguments.

    Only attributes with plain data or captured objects are compared. With `arguments`, the object is compared with a
    twin made from them. Without, it is first compared with its own state right after construction, and then with a twin
    made from the captured arguments, because a list that was passed may have grown together with the attribute that
    holds it. An object that isn't captured is not compared without `arguments`.
    """
    now = _plain_attributes(obj)
    if arguments is None or arguments == captured_arguments(obj):
        call = record_of(obj).call
        if call is None or call.arguments is None:
            return []
        suspects = _differences(obj, call.attributes, now)
        if not suspects:
            return []
        made_with = call.arguments
    else:
        suspects, made_with = [], dict(arguments)
    try:
        twin = type(obj)(**made_with)
    except Exception:  # a user's constructor may raise anything; without a twin the difference stands
        return suspects
    return _differences(obj, _plain_attributes(twin), now)


def edited_arguments(obj: object) -> dict[str, Any]:
    """The arguments of a captured object whose attributes were set to other values after it was constructed.

    A framework's own functions and objects that replaced None are not arguments: a later run attaches them again.
    """
    call, edited = record_of(obj).call, {}
    for name in changed_since_made(obj):
        if call is not None and name in parameter_names(type(obj)) and hasattr(obj, name):
            value, was_none = getattr(obj, name), call.attributes.get(name) == _freeze(None)
            if not (was_none and (inspect.isroutine(value) or _freeze(value) is _NOT_PLAIN)):
                edited[name] = value
    return edited


def _decorate(target: Any, aliases: Mapping[str, str]) -> Any:
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise TypeError(
                f"{target.__qualname__} takes {stars}{parameter.name}, which would accept a misspelled name. List all "
                "parameters in the signature of a configurable class."
            )
    if isinstance(target, type):
        if not getattr(target, "__dictoffset__", 0):
            raise TypeError(
                f"{target.__qualname__} has __slots__ and no __dict__, so nemo2 cannot store its arguments. Remove "
                "__slots__."
            )
        _wrap_init(target)
        _follow_subclasses(target)
        guard(target, ready=lambda obj: captured_arguments(obj) is not None, refusal=unknown_name)
        register_aliases(target, **aliases)
        for alias, name in aliases_of(target).items():
            if "." not in name and not hasattr(target, alias):
                setattr(target, alias, _second_name(name))
        return target
    wrapped = _wrap_function(target)
    register_aliases(wrapped, **aliases)
    return wrapped


def _second_name(name: str) -> property:
    """A property for an alias. Without it, setting the alias on an object would create an attribute that nothing
    reads."""
    return property(
        lambda self: getattr(self, name),
        lambda self, value: setattr(self, name, value),
        doc=f"Second spelling of ``{name}``.",
    )


def remembers_arguments(cls: type) -> bool:
    """Whether instances of ``cls`` record their arguments."""
    return getattr(cls.__init__, _WRAPPED, False)


def check_arguments(fn: _T) -> _T:
    """Refuse arguments of a function that aren't of their type or that it doesn't have. Unlike a `configurable` function,
    no recipe can name it, so that a file from elsewhere can't call it."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        from nemo2.config.value_types import refuse_misfits

        kwargs = {name: read_dtype(call, name, value) for name, value in real_names(call, kwargs).items()}
        ordered = list(signature.parameters)[: len(args)]
        refuse_misfits(fn, signature.bind_partial(*args, **kwargs).arguments, ordered=ordered)
        return fn(*args, **kwargs)

    return cast(_T, call)


def _wrap_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    call = check_arguments(fn)
    setattr(call, _WRAPPED, True)
    return call


def _wrap_init(cls: type) -> None:
    """Replace the `__init__` that `cls` defines (or inherits unwrapped) with one that records the arguments."""
    init: Any = cls.__init__
    if getattr(init, _WRAPPED, False):
        return
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # `cls` and not `type(self)`: a subclass may pass the parent's aliases to super().__init__.
        kwargs = {name: read_dtype(cls, name, value) for name, value in real_names(cls, kwargs).items()}
        if is_being_made(self):
            init(self, *args, **kwargs)  # called by a subclass's constructor, whose arguments are recorded
            return
        place = line_of_caller()
        note_call(self, Call(place))
        init(self, *args, **kwargs)
        arguments = _bind(signature, self, args, kwargs)
        note_call(self, Call(place, arguments, _plain_attributes(self)))
        note_own_changes(self, arguments or {})

    setattr(__init__, _WRAPPED, True)
    cls.__init__ = __init__


def _follow_subclasses(cls: type) -> None:
    """Wrap the `__init__` of each new subclass, so that undecorated subclasses record their own arguments."""
    own = cls.__dict__.get("__init_subclass__")
    if getattr(getattr(own, "__func__", None), _WRAPPED, False):
        return

    def __init_subclass__(subclass: type, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, subclass)(**kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        if "__init__" in subclass.__dict__:
            _wrap_init(subclass)

    setattr(__init_subclass__, _WRAPPED, True)
    cls.__init_subclass__ = classmethod(__init_subclass__)  # pyright: ignore[reportAttributeAccessIssue]


def real_names(target: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` under their real names.

    Raises:
        ConfigError: a parameter is given under two names.
        UnknownNameError: a keyword is neither a parameter nor an alias.
    """
    names = parameter_names(target)
    if kwargs.keys() <= set(names):
        return kwargs
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters_of(target).values())
    aliases = {alias: real for alias, real in aliases_of(target).items() if "." not in real}
    renamed: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in kwargs.items():
        real = aliases.get(name, name)
        if real not in names and not open_ended:
            raise unknown_name(target, name)
        if real in renamed:
            shown = getattr(target, "__qualname__", str(target))
            raise ConfigError(
                f"{shown} got both {spelled[real]!r} and {name!r}, two names of the same parameter. Keep one of them."
            )
        renamed[real] = value
        spelled[real] = name
    return renamed


def unknown_name(target: Any, name: str) -> UnknownNameError:
    """The error for a name that `target` lacks, with the replacement, or the nearest of its parameters and aliases."""
    shown = getattr(target, "__qualname__", str(target))
    return UnknownNameError(f"{shown} has no parameter {name!r}", hint=functools.partial(_hint, target, name))


def _hint(target: Any, name: str) -> str:
    from nemo2.config.homes import homes_of, usual_class_with

    if (reason := gone(target, name)) is not None:
        return f": {reason}"
    if homes := homes_of(name, besides=target):
        return f": it is a field of another part. Set {' or '.join(homes)}."
    if usual := usual_class_with(name, in_place_of=target):
        return f": only {usual} has it. Remove it, or use {usual}."
    return did_you_mean(name, [one for one in (*parameter_names(target), *aliases_of(target)) if one != name])


def _bind(signature: inspect.Signature, obj: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by name. None: positional extras have no names."""
    bound = signature.bind(obj, *args, **kwargs)
    arguments: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        kind = signature.parameters[name].kind
        if index == 0:
            continue  # self
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return None
        else:
            arguments[name] = value
    return arguments


_NOT_PLAIN = object()


def _plain_attributes(obj: object) -> dict[str, Any]:
    """Frozen copies of the values of public attributes. `_NOT_PLAIN` for a value that isn't plain data."""
    attributes = getattr(obj, "__dict__", {})
    return {name: _freeze(value) for name, value in attributes.items() if not name.startswith("_")}


def _differences(obj: object, before: Mapping[str, Any], now: dict[str, Any]) -> list[str]:
    parameters, different = parameter_names(type(obj)), []
    for name in before.keys() | now.keys():
        old, new = before.get(name, _NOT_PLAIN), now.get(name, _NOT_PLAIN)
        if old is _NOT_PLAIN and new is _NOT_PLAIN:
            continue
        # Frameworks attach themselves by replacing None with an object. Only a parameter's own attribute is the user's.
        if (old is _NOT_PLAIN or new is _NOT_PLAIN) and name not in parameters:
            continue
        if not is_same(old, new):
            different.append(name)
    return sorted(different)


def _freeze(value: Any) -> Any:
    """A copy of plain data that is independent of later changes, for `is_same`. A captured object is described by its
    arguments, so that another in its place is noticed. `_NOT_PLAIN` for anything else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum):
        return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)  # nan equals itself
    references = isinstance(value, type) or inspect.isroutine(value) or type(value).__name__ == "dtype"
    if references or isinstance(value, pathlib.PurePath | timedelta):
        return (type(value), value)
    if isinstance(value, list | tuple | set | frozenset | dict) and len(value) <= _MAX_COMPARED_ITEMS:
        if isinstance(value, dict):
            items = [(_freeze(key), _freeze(item)) for key, item in value.items()]
            plain = all(key is not _NOT_PLAIN and item is not _NOT_PLAIN for key, item in items)
            return (type(value), items) if plain else _NOT_PLAIN
        if isinstance(value, set | frozenset):
            return (type(value), frozenset(value))
        frozen = [_freeze(item) for item in value]
        return (type(value), frozen) if all(item is not _NOT_PLAIN for item in frozen) else _NOT_PLAIN
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, _freeze(getattr(value, field.name, None))) for field in dataclasses.fields(value)]
        if all(item is not _NOT_PLAIN for _, item in fields):
            return (type(value), fields)
    if (arguments := captured_arguments(value)) is None:
        return _NOT_PLAIN
    frozen = {name: _freeze(item) for name, item in arguments.items()}
    return (type(value), {name: arguments[name] if item is _NOT_PLAIN else item for name, item in frozen.items()})


_GUARD = "__nemo2_guard__"
_KEEP_STATE = {
    ("torch.nn.modules.module", "Module"),
    ("lightning.pytorch.core.datamodule", "LightningDataModule"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
}
_SET_BY_LIGHTNING = {"log", "log_dict"}
"""What its trainer hangs on every callback without declaring it."""
_ALMOST = 0.85
"""The required share of equal letters: one or two letters may differ, not a word."""


def guard(cls: type, *, ready: Callable[[Any], bool], refusal: Callable[[type, str], Exception]) -> None:
    """Make instances of ``cls`` and of its subclasses in nemo2 refuse unknown attributes.

    Args:
        ready: Whether an object's constructor has ended.
        refusal: The error for a class and a name.
    """
    original: Any = cls.__setattr__
    if getattr(original, _GUARD, False):
        return

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name not in self.__dict__ and ready(self) and _means_nothing(self, name):
            raise refusal(type(self), name)
        original(self, name, value)

    setattr(__setattr__, _GUARD, True)
    cls.__setattr__ = __setattr__  # pyright: ignore[reportAttributeAccessIssue]


def _means_nothing(obj: Any, name: str) -> bool:
    cls = type(obj)
    if (
        name.startswith("_")
        or name in _SET_BY_LIGHTNING
        or not cls.__module__.startswith("nemo2.")
        or hasattr(cls, name)
    ):
        return False
    registered = (obj.__dict__.get(kind, ()) for kind in ("_modules", "_parameters", "_buffers"))
    if any(name in names for names in registered) or name in (names_of_class := _known(cls)):
        return False
    keeps_state = any((base.__module__, base.__qualname__) in _KEEP_STATE for base in cls.__mro__)
    if not keeps_state or gone(cls, name) is not None:
        return True
    public = (one for one in obj.__dict__ if not one.startswith("_"))
    return bool(difflib.get_close_matches(name, {*names_of_class, *public}, n=1, cutoff=_ALMOST))


def _known(cls: type) -> set[str]:
    declared = (name for base in cls.__mro__ for name in getattr(base, "__annotations__", {}))
    return {*parameter_names(cls), *aliases_of(cls), *declared}
