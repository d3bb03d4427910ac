# SPDX-License-Identifier: Apache-2.0
"""``recipes/_typed.pyi``: the types of recipes for type checkers and editors, written from signatures and from the recipes
themselves. Nothing imports it at run time.

A class of the stub describes a config: the fields of the class that it configures, with a field's type and default. Where a
field holds a config in some recipe, reading it gives the type of that config, and any other config can be assigned. Fields of
Megatron-Core's dataclasses are not repeated: those types inherit the dataclass. ``make fmt`` runs this by way of
`tools.recipe_stub`.
"""

import dataclasses
import datetime
import enum
import functools
import inspect
import pathlib
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
import lightning.pytorch as pl
import torch

from nemo2 import llm, recipes
from nemo2.config import Config
from nemo2.config.aliases import aliases_of
from nemo2.recipes._assembler import AS_STATED, load
from nemo2.recipes._finetuning import SCHEMES

_HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
# Written by `make fmt` (tools/recipe_types.py) from signatures and recipes.
{imports}

_Read = typing.TypeVar("_Read")
_Write = typing.TypeVar("_Write")
_Model = typing.TypeVar("_Model")
_ModelConfig = typing.TypeVar("_ModelConfig")
_Data = typing.TypeVar("_Data")
_FinetuningData = typing.TypeVar("_FinetuningData")
AnyConfig = fiddle.Buildable[typing.Any]

class _Closed:
    # A field that a class doesn't have is an error, though a config's `__getattr__` takes any name.
    __getattr__: None
    __setattr__: None

class Part(typing.Generic[_Read, _Write]):
    """A field that recipes set to a config, which can be replaced by a config of another class."""

    def __get__(self, obj: object, owner: type | None = None) -> _Read: ...
    def __set__(self, obj: object, value: _Write) -> None: ...

class AnyRecipe:
    """A recipe whose name is known at run time only."""

    RECIPE: nemo2.recipes._assembler.PretrainRecipe
    FINETUNE: nemo2.recipes._finetuning.FinetuneRecipe
    def model(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any: ...
    def trainer(self, *args: typing.Any, **kwargs: typing.Any) -> Trainer: ...
    def pretrain_recipe(self, *args: typing.Any, **kwargs: typing.Any) -> Pretraining[typing.Any, typing.Any]: ...
    def finetune_recipe(self, *args: typing.Any, **kwargs: typing.Any) -> Finetuning[typing.Any, typing.Any]: ...

'''

_ALWAYS = (
    "collections.abc",
    "fiddle",
    "nemo2.config",
    "nemo2.recipes._assembler",
    "nemo2.recipes._finetuning",
    "typing",
)
"""The imports of every stub."""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None)),
    *(datetime.timedelta, pathlib.PurePath, enum.Enum, torch.dtype, torch.device),
)
"""Classes whose values stand in a recipe as they are."""

_Signatures = tuple[tuple[str, str], ...]


class Types:
    """The contents of the stubs. All recipes are built once. `text` is the whole of ``_typed.pyi`` before
    formatting."""

    def __init__(self) -> None:
        self._modules = set(_ALWAYS)
        self._parts: dict[Any, dict[str, dict[Any, None]]] = defaultdict(lambda: defaultdict(dict))
        self._held: dict[str, list[str]] = {}
        for name in recipes.names():
            module = getattr(recipes, name)
            model = module.model()
            data = [load(facts.data_class) for facts in (module.RECIPE, getattr(module, "FINETUNE", None)) if facts]
            self._see(model, *map(Config, data))
            self._held[name] = [f"{_name(_target(model))}[{_name(_target(model.config))}]", *map(_name, data)]
        for module in (recipes.llama_tiny, recipes.llama3_8b):  # all recipes have these parts
            self._see(module.pretrain_recipe(), *(module.finetune_recipe(peft_scheme=scheme) for scheme in SCHEMES))
        self._doors = self._grouped()
        body = "\n".join([*self._configs(), *self._trees(), *self._door_classes(), *self._declared()])
        imports = "\n".join(f"import {module}" for module in sorted(self._modules))
        self.text = _HEAD.format(imports=imports) + body

    def _see(self, *nodes: Any) -> None:
        """Remember which fields hold configs, of which classes, at and below these nodes."""
        for node in nodes:
            if not isinstance(node, fdl.Buildable):
                continue
            fields = self._parts[node.__fn_or_cls__]
            for name, value in node.__arguments__.items():
                if isinstance(value, fdl.Buildable):
                    fields[name][value.__fn_or_cls__] = None
                    self._see(value)

    # ------------------------------------------------------------------------------------------------ types of configs

    def _configs(self) -> Iterator[str]:
        """A class for each that a recipe configures; those with the same fields have them from one base."""
        targets = sorted((one for one in self._parts if isinstance(one, type) and _is_ours(one)), key=_name)
        fields = {one: self._fields(one) for one in targets}
        shared: dict[str, str] = {}
        for one in targets:
            if fields[one] and list(fields.values()).count(fields[one]) > 1 and fields[one] not in shared:
                sharing = [other for other in targets if fields[other] == fields[one]]
                shared[fields[one]] = f"_{_name(_base(sharing))}Fields"
                generic = "(typing.Generic[_ModelConfig])" if _is_model(one) else ""
                yield f"class {shared[fields[one]]}{generic}:\n{fields[one]}"
        for one in targets:
            of = "[_ModelConfig]" if _is_model(one) else ""
            inherited = [shared[fields[one]] + of] if fields[one] in shared else []
            whole = self._class(one)
            bases = [*inherited, "_Closed", *([whole] if _tells_its_fields(one) else [])]
            bases += [f"nemo2.config.Config[{whole}]"]
            bases += ["typing.Generic[_ModelConfig]"] if of and not inherited else []
            body = "..." if inherited or not fields[one] else f"\n{fields[one]}"
            yield f"class {_name(one)}({', '.join(bases)}): {body}"

    def _trees(self) -> Iterator[str]:
        """The classes of whole recipes."""
        for function, data in ((llm.pretrain, "_Data"), (llm.finetune, "_FinetuningData")):
            returns = self._text(_hints(function)["return"])
            bases = f"_Closed, nemo2.config.Partial[{returns}], typing.Generic[_Model, {data}]"
            variables = {"model": "_Model", "data": data}
            yield f"class {_TREES[function.__name__]}({bases}):\n{self._fields(function, variables)}"

    def _fields(self, target: Any, variables: dict[str, str] | None = None) -> str:
        """The fields of a config's class. For a class whose fields type checkers find themselves: only aliases and
        parts."""
        variables = variables or ({"config": "_ModelConfig"} if _is_model(target) else {})
        shown = list(inspect.signature(target).parameters)
        if _tells_its_fields(target):
            shown = [name for name in shown if name in self._parts[target]]
        told = {name: self._field(target, name, variables) for name in shown}
        lines = [f'    {name}: {kind}\n    """{about}"""' for name, (kind, about) in told.items()]
        for alias, real in aliases_of(target).items():
            lines.append(f'    {alias}: {self._aliased(target, real)}\n    """The same as `{real}`."""')
        return "\n".join(lines)

    def _aliased(self, target: Any, real: str) -> str:
        while "." in real:
            first, _, real = real.partition(".")
            [target] = self._parts[target][first]
        return self._field(target, real, {})[0]

    def _field(self, target: Any, name: str, variables: dict[str, str]) -> tuple[str, str]:
        """The type of a field, and what is said of it."""
        parameter = inspect.signature(target).parameters[name]
        annotation = _hints(target).get(name, Any)
        about = "Required." if parameter.default is parameter.empty else f"Default: {_shown(target, name, parameter)}."
        kind = self._text(annotation)
        if parameter.default is None and "None" not in kind and kind != "typing.Any":
            kind += " | None"
        if "torch.dtype" in kind:
            kind += " | str"  # read as one
        parts = self._parts[target].get(name)
        if not parts and not _may_hold_configs(annotation):
            return kind, about
        written = f"{kind} | AnyConfig" if kind != "typing.Any" else kind
        if not parts:
            return ("list[typing.Any]" if name == "callbacks" else written), about
        read = variables.get(name) or " | ".join(sorted(self._node(part) for part in parts))
        written = f"{read} | {written}" if name in variables else written
        return f"Part[{read}, {written}]", about

    def _node(self, target: Any) -> str:
        """The type of a config of this class."""
        return _name(target) if _is_ours(target) else f"nemo2.config.Config[{self._class(target)}]"

    # ------------------------------------------------------------------------------------------------ recipes' modules

    def _grouped(self) -> dict[_Signatures, str]:
        """A class of modules for each way in which recipes are called."""
        found: dict[_Signatures, str] = {}
        for name in recipes.names():
            module = getattr(recipes, name)
            own = module.pretrain_recipe.__module__ == module.__name__
            called = name.title().replace("_", "") if own else type(module.RECIPE).__name__.removesuffix("Recipe")
            fine_tuned = "AndFinetune" if hasattr(module, "finetune_recipe") else ""
            found.setdefault(_signatures(name), f"{called}{fine_tuned}")
        assert len(set(found.values())) == len(found), found
        return dict(sorted(found.items(), key=lambda item: len(item[0])))

    def _door_classes(self) -> Iterator[str]:
        common = set.intersection(*(set(signatures) for signatures in self._doors))
        [*_, module] = (getattr(recipes, name) for name in recipes.names())
        lines = [self._method(name, getattr(module, name)) for name, _ in sorted(common)]
        yield "class _Module:\n" + "\n".join(lines)
        for signatures, door in self._doors.items():
            members = [name for name in recipes.names() if _signatures(name) == signatures]
            fine_tuned = "finetune_recipe" in dict(signatures)
            inherited = next((one for one in self._doors if {*one} < {*signatures}), ())
            module = getattr(recipes, members[0])
            facts = ["RECIPE", *(["FINETUNE"] if fine_tuned else [])]
            lines = [f"    {one}: {self._class(type(getattr(module, one)))}" for one in facts]
            extras = {name: getattr(recipes, one) for one in members for name in _functions(one) if name not in _CALLED}
            for extra, home in sorted(extras.items()):
                known = extra in _RETURNED
                otherwise = f"    {extra}: collections.abc.Callable[..., typing.Any]"
                lines.append(self._method(extra, getattr(home, extra)) if known else otherwise)
            new = [name for name, text in signatures if (name, text) not in {*common, *inherited}]
            lines += [self._method(name, getattr(module, name)) for name in new]
            variables = ["_Model", "_Data", *(["_FinetuningData"] if fine_tuned else [])]
            base = f"{self._doors[inherited]}[_Model, _Data]" if inherited else "_Module"
            yield f"class {door}({base}, typing.Generic[{', '.join(variables)}]):\n" + "\n".join(lines)

    def _declared(self) -> Iterator[str]:
        yield ""
        for name in recipes.names():
            yield f"{name}: {self._doors[_signatures(name)]}[{', '.join(self._held[name])}]"

    def _method(self, name: str, function: Callable[..., Any]) -> str:
        hints = _hints(function)
        given = ["self"]
        for parameter in inspect.signature(function).parameters.values():
            default = "" if parameter.default is parameter.empty else f" = {_literal(parameter.default)}"
            given.append(f"{parameter.name}: {self._text(hints.get(parameter.name, Any))}{default}")
        lines = (inspect.getdoc(function) or "").splitlines()
        doc = "\n".join([lines[0], *(f"        {line}".rstrip() for line in lines[1:])]) if lines else ""
        end = "\n        " if len(lines) > 1 else ""
        return f'    def {name}({", ".join(given)}) -> {_RETURNED.get(name, "typing.Any")}:\n        """{doc}{end}"""'

    # ----------------------------------------------------------------------------------------------------- annotations

    def _text(self, annotation: Any) -> str:
        """An annotation as the stub writes it. What it can't say is Any."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if annotation is None or annotation is type(None):
            return "None"
        if origin in (typing.Union, types.UnionType):
            # In an order of its own: Python keeps that of whoever wrote the same union first.
            told = sorted({self._text(one) for one in arguments}, key=lambda one: (one == "None", one))
            return "typing.Any" if "typing.Any" in told else " | ".join(told)
        if origin is typing.Literal:
            return f"typing.Literal[{', '.join(sorted(map(repr, arguments)))}]"
        if origin is typing.Annotated:
            return self._text(arguments[0])
        if origin is Callable and arguments:
            taken = "..." if arguments[0] is ... else f"[{', '.join(self._text(one) for one in arguments[0])}]"
            return f"{self._class(origin)}[{taken}, {self._text(arguments[1])}]"
        if origin is not None:
            if not arguments:
                return f"{self._class(origin)}[..., typing.Any]" if origin is Callable else self._class(origin)
            return f"{self._class(origin)}[{', '.join('...' if one is ... else self._item(one) for one in arguments)}]"
        return self._class(annotation, bare=True) if isinstance(annotation, type) else "typing.Any"

    def _item(self, annotation: Any) -> str:
        """An annotation inside of a container, which may hold configs in place of objects."""
        return "typing.Any" if _may_hold_configs(annotation) else self._text(annotation)

    def _class(self, one: type, *, bare: bool = False) -> str:
        if one.__module__ == "builtins":
            return _BARE.get(one.__name__, one.__name__) if bare else one.__name__
        self._modules.add(one.__module__)
        return f"{one.__module__}.{one.__qualname__}"


_BARE = {"list": "list[typing.Any]", "dict": "dict[typing.Any, typing.Any]", "tuple": "tuple[typing.Any, ...]"}
_TREES = {"pretrain": "Pretraining", "finetune": "Finetuning"}
_RETURNED = {
    "model": "_Model",
    "trainer": "Trainer",
    "pretrain_recipe": "Pretraining[_Model, _Data]",
    "pretrain_recipe_performance": "Pretraining[_Model, _Data]",
    "finetune_recipe": "Finetuning[_Model, _FinetuningData]",
}
_CALLED = ("model", "trainer", "pretrain_recipe", "finetune_recipe", "tokenizer")


def _functions(recipe: str) -> list[str]:
    """The public functions of a recipe's module."""
    module = getattr(recipes, recipe)
    return [
        name
        for name, one in vars(module).items()
        if not name.startswith("_") and (inspect.ismethod(one) or getattr(one, "__module__", "") == module.__name__)
    ]


@functools.cache
def _signatures(recipe: str) -> "_Signatures":
    """The signatures of a recipe's functions. Recipes with equal signatures share a class."""
    module = getattr(recipes, recipe)
    return tuple((name, str(inspect.signature(getattr(module, name)))) for name in _CALLED if hasattr(module, name))


def _target(node: Any) -> Any:
    return node.__fn_or_cls__


def _base(targets: list[type]) -> type:
    """The nearest class that all of these are of."""
    return next(base for base in targets[0].__mro__ if all(issubclass(one, base) for one in targets))


def _name(target: Any) -> str:
    return target.__name__


def _is_model(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, pl.LightningModule)


def _is_ours(target: Any) -> bool:
    """Whether the fields of this class are known: those of nemo2's classes and of dataclasses are."""
    return target.__module__.startswith("nemo2.") or dataclasses.is_dataclass(target)


def _tells_its_fields(target: Any) -> bool:
    """Whether the class is, or derives from, a dataclass of another distribution, whose fields depend on the installed
    version."""
    owners = target.__mro__ if isinstance(target, type) else ()
    return any(dataclasses.is_dataclass(one) and not one.__module__.startswith("nemo2.") for one in owners)


def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if isinstance(target, type) else target)
    except NameError:  # names for type checkers only
        given = inspect.signature(target).parameters.values()
        return {one.name: one.annotation for one in given if not isinstance(one.annotation, str)}


def _may_hold_configs(annotation: Any) -> bool:
    """Whether values of it can be objects, in whose place a recipe has configs."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Literal, Callable):
        return False
    if origin is not None:
        return any(_may_hold_configs(one) for one in typing.get_args(annotation) if one is not ...)
    return isinstance(annotation, type) and not issubclass(annotation, _PLAIN) and annotation is not object


def _literal(value: Any) -> str:
    return repr(value) if value is None or type(value) in (bool, int, float, str) else "..."


def _shown(target: Any, name: str, parameter: inspect.Parameter) -> str:
    value = parameter.default
    if dataclasses.is_dataclass(target):
        # A subclass with an ``__init__`` of its own has arguments that are no fields.
        factories = {one.name: one.default_factory for one in dataclasses.fields(target)}
        factory = factories.get(name, dataclasses.MISSING)
        if factory is not dataclasses.MISSING:
            return f"`{getattr(factory, '__name__', factory)}()`"
    if value is AS_STATED:
        return "the recipe's"
    if isinstance(value, type) or inspect.isroutine(value):
        return f"`{value.__qualname__}`"
    return f"`{value!r}`"
