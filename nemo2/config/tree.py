# SPDX-License-Identifier: Apache-2.0
"""`Config` and `Partial`: nemo-run's config nodes with aliases, helpful errors and live objects.

They subclass `nemo_run.Config` and `nemo_run.Partial`, and so fiddle's classes, and work wherever those do. They add:

- An alias reads and sets the parameter that it stands for, anywhere in the tree (`recipe.strategy`).
- An unknown name raises an error at the line that uses it, with the nearest names.
- `isinstance(config, Target)` is True for a Config of `Target`, so one expression filters configs and objects.
- A text that stands for a config (``ddp="megatron"``) reads as the config. Editing that sets it.
- An unset parameter reads as its effective default, which another part of the recipe may decide
  (`nemo2.config.aliases.DECIDED_ELSEWHERE`). Editing a mutable default counts as setting it.
- Live objects become configs when the tree is traversed. They build to themselves unless they were edited.
- Values that fiddle can't write as JSON (paths, time spans, dtypes, torch's built-in functions) are written too.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import fiddle as fdl
import nemo_run as run
from fiddle._src import building, casting, history, signatures
from fiddle._src.experimental import serialization

from nemo2.base.errors import ConfigError, UnknownNameError, UnsetFieldError
from nemo2.config import live, wire
from nemo2.config.aliases import NOT_HERE, aliases_of, decided_elsewhere, text_form
from nemo2.config.capture import edited_arguments, is_configurable, made_at, real_names, unknown_name
from nemo2.config.dtypes import read_dtype
from nemo2.config.located import recorded_at
from nemo2.config.provenance import note_explicit_fields

T = TypeVar("T")

_MACHINERY = re.compile(r"[/\\](fiddle|nemo_run)[/\\]")
"""Files that are not the origin of a value: they copy trees or read them from JSON."""

_OUR_FILES = ("tree.py", "aliases.py", "live.py", "wire.py", "walk.py", "overrides.py")
for _file in ("nemo_run/config.py", *(f"nemo2/config/{name}" for name in _OUR_FILES)):
    # A field's history names the line of the recipe or the user that set it, not the machinery in between.
    history.add_exclude_location(os.path.normpath(_file))

_bind = signatures.SignatureInfo.signature_binding


@functools.wraps(_bind)
def _bind_by_any_name(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _bind(target, *args, **(real_names(target, kwargs) if is_configurable(target) else kwargs))


# `run.Config(OurClass, ...)` binds its arguments here: with our aliases, and with the nearest names for an unknown one.
signatures.SignatureInfo.signature_binding = staticmethod(_bind_by_any_name)


class _Default(NamedTuple):
    """A mutable default that was returned to a reader. It becomes an argument once it differs from what was
    returned."""

    value: Any
    as_handed_out: Any
    entry: history.HistoryEntry


class _Origin:
    """The live object that a node was made from. Copies of the node forget it, because two recipes don't share one
    object."""

    def __init__(self, obj: object, arguments: dict[str, Any], fingerprint: Any) -> None:
        self.obj = obj
        self.arguments = arguments
        self.fingerprint = fingerprint

    def __deepcopy__(self, memo: dict) -> None:
        return None


class _Node:
    """Base class of `Config` and `Partial`. It has no public names, because they would hide parameters."""

    __fn_or_cls__: Any
    __arguments__: dict[Any, Any]
    __argument_history__: Any
    __signature_info__: Any

    def __init__(self, fn_or_cls: Any, /, *args: Any, bind_args: bool = True, **kwargs: Any) -> None:
        paths: dict[str, Any] = {}
        if callable(fn_or_cls) and not isinstance(fn_or_cls, fdl.Buildable):
            kwargs, paths = _sort_keywords(fn_or_cls, kwargs)
        # Converted here, because nemo-run would turn nested dataclasses into plain fiddle configs.
        args = tuple(_adopt(value) for value in args)
        super().__init__(fn_or_cls, *args, bind_args=bind_args, **{k: _adopt(v) for k, v in kwargs.items()})  # pyright: ignore[reportCallIssue]
        for alias, value in paths.items():
            setattr(self, alias, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # protocols look these up before arguments exist
            raise AttributeError(name)
        if alias := aliases_of(self.__fn_or_cls__).get(name):
            owner, real = alias_owner(self, name, alias)
            return getattr(owner, real)
        if (config := self._config_of_text(name)) is not None:
            return _read_through(self, config)
        elsewhere = decided_elsewhere(self.__fn_or_cls__, name)
        if name in self.__arguments__ and (elsewhere is None or not self._is_default_none(name)):
            return _read_through(self, self.__arguments__[name])
        if elsewhere is not None:
            part = _read_from_root(self, elsewhere.path)
            decided = elsewhere.read(part) if isinstance(part, _Node) else NOT_HERE
            if decided is not NOT_HERE:
                return decided
        has_default, default = (True, None) if name in self.__arguments__ else self._effective_default(name)
        if has_default:
            return _read_through(self, default)
        raise _unreadable(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if alias := aliases_of(self.__fn_or_cls__).get(name):
            owner, real = alias_owner(self, name, alias)
            setattr(owner, real, value)
            return
        if not _is_parameter(self, name) and not self.__signature_info__.has_var_keyword:
            raise unknown_name(self.__fn_or_cls__, name)
        self.__dict__.get("_defaults", {}).pop(name, None)
        super().__setattr__(name, _adopt(read_dtype(self.__fn_or_cls__, name, value)))

    def __delattr__(self, name: str) -> None:
        if alias := aliases_of(self.__fn_or_cls__).get(name):
            owner, real = alias_owner(self, name, alias)
            delattr(owner, real)
            return
        edited = self.__dict__.get("_defaults", {}).pop(name, None)
        if name in self.__arguments__:
            super().__delattr__(name)
        elif edited is None:
            raise AttributeError(f"{_target_name(self)} has no value set for {name!r}, so there is no value to delete.")

    def __flatten__(self) -> Any:
        bring_up_to_date(self)
        return super().__flatten__()  # pyright: ignore[reportAttributeAccessIssue]

    def __path_elements__(self) -> Any:
        bring_up_to_date(self)
        return super().__path_elements__()  # pyright: ignore[reportAttributeAccessIssue]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        bring_up_to_date(self)
        refuse_changed_objects(self)
        parent = self.__dict__.pop("_read_from", None)  # isn't a part of this node, and isn't copied with it
        try:
            copied = super().__deepcopy__(memo)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            if parent is not None:
                object.__setattr__(self, "_read_from", parent)
        if parent is not None:
            object.__setattr__(copied, "_read_from", memo.get(id(parent), parent))
        return copied

    def __eq__(self, other: object) -> bool:
        for node in (self, other):
            if isinstance(node, _Node):
                bring_up_to_date(node)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # mutable, as fiddle's are

    def __repr__(self) -> str:
        bring_up_to_date(self)
        return super().__repr__()

    def __getstate__(self) -> dict[str, Any]:
        bring_up_to_date(self)
        refuse_changed_objects(self)
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_origin", "_defaults", "_read_from")}  # pyright: ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle's default compares the type with __class__, which is the target's.
        return _blank, (type(self),), self.__getstate__()

    def _repr_svg_(self) -> None:
        """Disable nemo-run's Graphviz picture, which would appear beside the tree of `nemo2.config.html`."""

    def _is_default_none(self, name: str) -> bool:
        """Whether a set field is None like its default. Such a field decides no more than an unset field."""
        parameter = self.__signature_info__.parameters.get(name)
        return self.__arguments__[name] is None and parameter is not None and parameter.default is None

    def _effective_default(self, name: str) -> tuple[bool, Any]:
        """Whether `name` has a default, and the default. A mutable default is the same object at every reading."""
        defaults = self.__dict__.setdefault("_defaults", {})
        if name in defaults:
            return True, defaults[name].value
        factory = _default_factories(self.__fn_or_cls__).get(name)
        parameter = self.__signature_info__.parameters.get(name)
        if factory is not None:
            value = factory()
        elif parameter is not None and parameter.default is not parameter.empty:
            value = copy.copy(parameter.default) if type(parameter.default) in (list, dict, set) else parameter.default
        else:
            return False, None
        return True, self._hand_out(name, _adopt(value, remember=False))

    def _config_of_text(self, name: str) -> Any:
        """The config that the text in this field stands for. It replaces the text once it is edited. None: the field
        holds no such text."""
        form = text_form(self.__fn_or_cls__, name)
        if form is None:
            return None
        defaults = self.__dict__.setdefault("_defaults", {})
        if name in defaults:
            return defaults[name].value
        text = self.__arguments__.get(name, self.__signature_info__.parameters[name].default)
        config = form(text) if isinstance(text, str) else None
        return None if config is None else self._hand_out(name, config)

    def _hand_out(self, name: str, value: Any) -> Any:
        """``value``, which becomes an argument once a reader has edited it."""
        if isinstance(value, fdl.Buildable) or type(value) in (list, dict, set):
            entry = history.new_value(name, value)
            self.__dict__.setdefault("_defaults", {})[name] = _Default(value, _fingerprint(value), entry)
        return value


class _IsAlsoTarget:
    """`isinstance` knows a config as its target too, so that one expression filters configs and live objects. Apart from
    `_Node`, because a class body that names `__class__` can't use `super()`."""

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        target = self.__dict__.get("__fn_or_cls__")
        is_plain = not isinstance(target, type) or issubclass(target, _PLAIN)
        return type(self) if is_plain else _kind(type(self), target)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("The class of a config cannot be assigned.")


# A Config of one of these must not pass for a value of the type: fiddle and other libraries check such values with
# isinstance.
_PLAIN = (type, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, BaseException, fdl.Buildable)


@functools.cache
def _kind(cls: type, target: type) -> type:
    """The kind of ``target`` that its configs are: with the name and the text of a config for printers, which ask
    ``__class__`` for both. ``cls`` itself if ``target`` can't have subclasses."""
    names = ("__module__", "__qualname__", "__repr__")
    try:
        return types.new_class(
            cls.__name__, (target,), exec_body=lambda body: body.update({n: getattr(cls, n) for n in names})
        )
    except TypeError:
        return cls


class Config(_Node, _IsAlsoTarget, run.Config[T], Generic[T]):
    """Describe a call `Target(**arguments)` as an editable config, `Config(Target, **arguments)`. A launch builds it.

    Args:
        fn_or_cls: The class or function to call, or a config to copy.
        args: Positional arguments of the call.
        bind_args: Turn arguments that are dataclasses into configs, as nemo-run does. False: keep them as objects.
        kwargs: Arguments of the call, by the names of the target's parameters.
    """

    if TYPE_CHECKING:

        def __init__(self, fn_or_cls: Callable[..., T] | fdl.Buildable[T], /, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def __unflatten__(cls, values: Any, metadata: Any) -> Any:
        # Bypasses nemo-run's, which forgets the target of a Config of `dict`.
        return super(run.Config, cls).__unflatten__(values, metadata)

    def __build__(self, /, *args: Any, **kwargs: Any) -> Any:
        origin: _Origin | None = self.__dict__.get("_origin")
        if origin is not None and origin.fingerprint == _fingerprint(self.__arguments__):
            return origin.obj
        built = super().__build__(*args, **kwargs)
        if isinstance(self.__fn_or_cls__, type) and type(built) is self.__fn_or_cls__:
            # From the history, which a recipe read from JSON lacks.
            places: dict[str, str] = {}
            for name in kwargs:
                location = next((entry.location for entry in reversed(self.__argument_history__.get(name, ()))), None)
                if location is not None and not _MACHINERY.search(location.filename):
                    places[name] = f"{location.filename}:{location.line_number}"
            note_explicit_fields(built, kwargs, places)
        return built


class Partial(_Node, run.Partial[T], Generic[T]):
    """Describe a function with some arguments, `Partial(function, **arguments)`. It builds to the function with
    these arguments bound, which nemo-run runs.

    Args:
        fn_or_cls: The function or class, or a config to copy.
        args: Positional arguments to bind.
        bind_args: Turn arguments that are dataclasses into configs, as nemo-run does. False: keep them as objects.
        kwargs: Arguments to bind, by the names of the target's parameters.
    """

    if TYPE_CHECKING:

        def __init__(self, fn_or_cls: Callable[..., T] | fdl.Buildable[T], /, *args: Any, **kwargs: Any) -> None: ...


def as_config(obj: Any) -> Config:
    """Return a config that describes a live object: its arguments when it was made, with nested dataclasses in their
    current state.

    The config is independent of the object. Building it makes another object, and later changes of one don't affect the
    other. For a config, a copy is returned.

    Raises:
        ConfigError: the object did not record its arguments.
    """
    if isinstance(obj, fdl.Buildable):
        return copy.deepcopy(obj)  # pyright: ignore[reportReturnType]
    node = _adopt(obj, remember=False)
    if not isinstance(node, fdl.Buildable):
        name = type(obj).__qualname__
        raise ConfigError(
            f"nemo2 cannot tell how a live {name} was created. Decorate the class with @nemo2.config.configurable, or "
            f"write nemo2.config.Config({name}, ...) yourself."
        )
    return node  # pyright: ignore[reportReturnType]


def described_now(value: Any) -> Any:
    """The config of a live object in its current state: attributes that were set after it was made count too. An object
    that did not record its arguments is returned itself. Building the config makes another object."""
    if type(value) in (list, tuple):
        return type(value)(described_now(item) for item in value)
    if type(value) is dict:
        return {key: described_now(item) for key, item in value.items()}
    arguments = live.rebuilding_arguments(value)
    if arguments is None:
        return value
    arguments |= edited_arguments(value)
    return Config(type(value), bind_args=False, **{name: described_now(item) for name, item in arguments.items()})


def _sort_keywords(target: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constructor keywords under their real names, and those whose alias leads into a sub-config."""
    paths = {alias: kwargs[alias] for alias, real in aliases_of(target).items() if "." in real and alias in kwargs}
    arguments = real_names(target, {name: value for name, value in kwargs.items() if name not in paths})
    return {name: read_dtype(target, name, value) for name, value in arguments.items()}, paths


def alias_owner(node: Any, alias: str, real: str) -> tuple[Any, str]:
    """The config that holds the parameter behind `alias`, and the parameter's name there."""
    *parents, last = real.split(".")
    owner = node
    for depth, parent in enumerate(parents, start=1):
        try:
            owner = getattr(owner, parent)
        except UnknownNameError:
            raise
        except AttributeError:
            owner = None
        if owner is None:
            path = ".".join(parents[:depth])
            raise UnknownNameError(
                f"{alias!r} of {_target_name(node)} stands for {real!r}, but {path!r} is not set. Set {path!r} first."
            )
    return owner, last


def _adopt(value: Any, *, remember: bool = True) -> Any:
    """`value`, or its config if it is a live object that can become one.

    With `remember`, the config builds to that same object unless it is edited.
    """
    if type(value) is functools.partial:
        call = live.partial_call(value)
        return value if call is None else Partial(value.func, *call[0], **call[1])
    arguments = live.rebuilding_arguments(value)
    if arguments is None:
        return value
    adopted = {name: _adopted_copy(item, remember=remember) for name, item in arguments.items()}
    place = made_at(value)
    with recorded_at(*place) if place else contextlib.nullcontext():  # history names the line that made the object
        node = Config(type(value), bind_args=False, **adopted)
    if remember:
        object.__setattr__(node, "_origin", _Origin(value, arguments, _fingerprint(node.__arguments__)))
    return node


def _adopted_copy(value: Any, *, remember: bool) -> Any:
    """`_adopt` for a live object's argument. Containers are copied, because the object may hold the same list."""
    if type(value) in (list, tuple):
        return type(value)(_adopted_copy(item, remember=remember) for item in value)
    if type(value) is dict:
        return {key: _adopted_copy(item, remember=remember) for key, item in value.items()}
    return _adopt(value, remember=remember)


def bring_up_to_date(node: Any) -> None:
    """Update the arguments in place: edited defaults become arguments, and live objects become configs."""
    defaults: dict[str, _Default] = node.__dict__.get("_defaults") or {}
    for name in [name for name, default in defaults.items() if _fingerprint(default.value) != default.as_handed_out]:
        default = defaults.pop(name)
        node.__arguments__[name] = default.value
        node.__argument_history__[name].append(default.entry)
    adopted: dict[int, Any] = {}
    for name, value in node.__arguments__.items():
        settled = _settle_value(value, adopted)
        if settled is not value:
            node.__arguments__[name] = settled


def _settle_value(value: Any, adopted: dict[int, Any]) -> Any:
    if isinstance(value, str | int | float | fdl.Buildable) or value is None:
        return value
    if type(value) is list:
        for index, item in enumerate(value):
            value[index] = _settle_value(item, adopted)
        return value
    if type(value) is dict:
        for key, item in value.items():
            value[key] = _settle_value(item, adopted)
        return value
    if type(value) is tuple:
        items = tuple(_settle_value(item, adopted) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if id(value) not in adopted:
        adopted[id(value)] = _adopt(value)
    return adopted[id(value)]


def refuse_changed_objects(node: Any) -> None:
    """Reject a node that doesn't describe the current state of its live object.

    Not used when building, because the build returns the object itself in its current state.
    """
    origin: _Origin | None = node.__dict__.get("_origin")
    if origin is not None and not building._state.in_build:
        live.refuse_if_changed(origin.obj, origin.arguments, where="The recipe")


def _fingerprint(value: Any) -> Any:
    """A value that compares equal until `value` is edited. It doesn't copy `value`."""
    if isinstance(value, fdl.Buildable):
        if isinstance(value, _Node):
            bring_up_to_date(value)
        return ("node", _Same(value), _Same(value.__fn_or_cls__), _fingerprint(dict(value.__arguments__)))
    if type(value) in (list, tuple):
        return (type(value), [_fingerprint(item) for item in value])
    if type(value) is dict:
        return (dict, [(key, _fingerprint(item)) for key, item in value.items()])
    if type(value) is set:
        return (set, set(value))
    if isinstance(value, bool | int | str | bytes):
        return (type(value), value)
    return _Same(value)


class _Same:
    """Equal only for the same object. Keeps the object alive so that its id isn't reused."""

    def __init__(self, obj: object) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.obj is self.obj

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict) -> "_Same":
        return _Same(copy.deepcopy(self.obj, memo))


@functools.lru_cache(maxsize=1024)
def _default_factories(target: Any) -> dict[str, Callable[[], Any]]:
    if (config := getattr(target, "default_config", None)) is not None:
        return {"config": config}
    if not dataclasses.is_dataclass(target):
        return {}
    fields = dataclasses.fields(target)
    return {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}


def _is_parameter(node: Any, name: str) -> bool:
    """Whether ``name`` is one of fiddle's ``valid_param_names``, which lists them all at each question."""
    parameter = node.__signature_info__.parameters.get(name)
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _unreadable(node: Any, name: str) -> AttributeError:
    target = _target_name(node)
    if _is_parameter(node, name):
        return UnsetFieldError(
            f"{name!r} of {target} is required but not set yet. Set it, as in `config.{name} = ...`."
        )
    if hasattr(node.__fn_or_cls__, name):
        return AttributeError(
            f"{name!r} is an attribute of the class {target}, but this object is a config of the class. Build the "
            "object first with `fiddle.build(config)`."
        )
    return unknown_name(node.__fn_or_cls__, name)


_UNKNOWN = object()


def _read_through(parent: Any, value: Any) -> Any:
    """``value``. If it is a node, it records the node through which it was read, because a parent may decide values."""
    if isinstance(value, _Node):
        object.__setattr__(value, "_read_from", parent)  # keeps a recipe of which only a part is still referenced
    return value


def _read_from_root(node: Any, path: str) -> Any:
    """The value at ``path`` of the recipe that ``node`` was reached through. "": ``node`` itself. `_UNKNOWN`: the
    recipe has no such part.

    A trainer that was made alone is its own recipe.
    """
    if not path:
        return node
    root = node
    while (parent := root.__dict__.get("_read_from")) is not None:
        root = parent
    steps = path.split(".")
    if steps[0] == "trainer" and not _is_parameter(root, "trainer"):
        steps = steps[1:]
    value = root
    for step in steps:
        try:
            value = getattr(value, step) if isinstance(value, _Node) and value is not node else _UNKNOWN
        except AttributeError:
            return _UNKNOWN
    return value


def _target_name(node: Any) -> str:
    return getattr(node.__fn_or_cls__, "__qualname__", str(node.__fn_or_cls__))


def _blank(cls: type) -> Any:
    return object.__new__(cls)


def _flatten_for_wire(node: Any) -> Any:
    refuse_changed_objects(node)
    values, metadata = node.__flatten__()
    for value in values:
        wire.register_values(value)
    return values, metadata


for _cls in (Config, Partial):
    serialization.register_node_traverser(
        _cls,
        flatten_fn=_flatten_for_wire,
        unflatten_fn=_cls.__unflatten__,
        path_elements_fn=lambda node: node.__path_elements__(),
    )
    for _other in (Config, Partial, run.Config, run.Partial, fdl.Config, fdl.Partial):
        casting.register_supported_cast(_cls, _other)
        casting.register_supported_cast(_other, _cls)
