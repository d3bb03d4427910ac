# SPDX-License-Identifier: Apache-2.0
"""The allow-list for recipes from elsewhere: the names that they may contain, the targets of their configs, and values
that are called later.

While a recipe is read, the file decides what gets called, at three moments:

- **now**: a config calls its target. The target must be a class made for configs, or an entry point at the recipe's
  root.
- **later, as an object**: a class or function that is a value is called by its receiver; Megatron-Core calls a spec's
  module with the spec's ``params``. It must be a layer, a configuration, an activation or similar.
- **later, by its name**: a library resolves text such as ``ModuleSpec(module=("os", "system"))``. A recipe may contain
  such text only if the named object would be allowed there. `NAMES_THAT_ARE_IMPORTED` lists the arguments;
  ``tests/nemo2/config/test_text_to_code.py`` compares it with the sources of the installed packages.

Names are looked up in the list before anything is imported for them. A class counts only under its own module, not
under an allowed module that happens to import it.
"""

import enum
import importlib
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import fiddle as fdl
from fiddle._src.experimental import serialization

from nemo2.base.errors import SecurityError
from nemo2.config import wire
from nemo2.config.capture import is_configurable
from nemo2.config.typed_text import WrongType

DEFAULT_ALLOWED = (
    "nemo2",
    "megatron.core",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "torch.nn.functional",
    "torch.nn.modules.activation",
    "torch.optim",
)
"""Module prefixes whose names a recipe may hold."""

_LEFT_OUT = (
    "megatron.core.models.audio",  # loads any file
    "megatron.core.models.huggingface",  # downloads and builds any name on the hub
    "megatron.core.tokenizers",
    "megatron.core.export",
    "nemo2.base.backend",
    "nemo2.launch",
)
"""Parts of these modules that load, start or patch things. No recipe contains them."""

STRUCTURE = {
    "builtins": {"dict", "list", "tuple", "set", "frozenset", "bytes", "slice", "int", "float", "str", "bool"},
    "fiddle._src.config": {"BuildableTraverserMetadata", "Config", "NoValue"},
    "fiddle._src.partial": {"Partial", "ArgFactory"},
    "nemo_run.config": {"Config", "Partial"},
    "nemo2.config.tree": {"Config", "Partial"},
}
"""Types that recipes themselves consist of. A config may call none of these but `dict`."""

_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}
_OPTIONS = {"CPUOffload", "MixedPrecision"}
VALUES = {
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "datetime": {"timedelta"},
    "torch": {"device"},
    "torch.distributed.fsdp": {"OffloadPolicy", "CPUOffloadPolicy", "MixedPrecisionPolicy", *_OPTIONS},
    "torch.distributed.fsdp.api": _OPTIONS,
}
"""Types of plain values. A config may also call these types."""

_FUNCTIONS = (
    "torch.nn.functional",
    "megatron.core.activations",
    "megatron.core.fusions",
    "megatron.core.models",
    "megatron.core.ssm",
    "megatron.core.transformer",
    "nemo2.models",
    "nemo2.mcore.optim.pytorch",
)
"""Modules with plain functions that configurations and specs of layers may contain: activations, fusions, makers of
specs or optimizers."""

_RESOLVERS = ("megatron.core.transformer.spec_utils",)
"""Modules of `_FUNCTIONS` whose functions import the names that they receive."""

_LAYERS = (
    "megatron.core.extensions",
    "megatron.core.fusions",
    "megatron.core.models",
    "megatron.core.ssm",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer",
)
"""Modules in which specs find classes that are no ``torch.nn.Module`` but create one, such as Megatron-Core's norms."""

_CONFIG_BASES = {
    "lightning.pytorch.callbacks.callback.Callback",
    "lightning.pytorch.loggers.logger.Logger",
    "torch.nn.modules.module.Module",
    "torch.optim.optimizer.Optimizer",
}
_VALUE_BASES = {"torch.utils.data.dataset.Dataset"}

NAMES_THAT_ARE_IMPORTED = {
    "module": "megatron.core.transformer.spec_utils.import_module, for any object with an attribute of that name",
    "fp8_quantizer_factory": "megatron.core.fp8_utils._resolve_callable_from_python_import_path",
    "fp4_quantizer_factory": "megatron.core.fp8_utils._resolve_callable_from_python_import_path",
    "fsdp_unit_modules": "megatron.core.distributed.fsdp.src.megatron_fsdp.MegatronFSDP._import_class_from_path",
}
"""Arguments whose text is imported, with the code that imports it."""

SWITCHES_THAT_RUN_CODE = {
    "trust_remote_code": "transformers then runs Python code from the tokenizer's folder",
    "code_revision": "transformers then runs Python code from the tokenizer's folder",
}
"""Arguments that an untrusted recipe must not turn on."""

MOST_VALUES = 10_000_000
"""The largest number of values in a recipe, with a shared value counted at each of its places. A large recipe has some
thousands."""

_NOT_LISTED = "this module is not on the list of modules that recipes may use"
_NOT_ITS_OWN = "its module does not itself define a class, function or constant of this name"


class RecipePolicy(serialization.PyrefPolicy):
    """The names that a recipe may contain, and the names that may be called, now or later.

    Args:
        allowed_modules: Module prefixes or ``module:name`` that count as made for recipes.
    """

    def __init__(self, allowed_modules: Iterable[str] = ()) -> None:
        self.trusted = tuple(allowed_modules)

    def allows_import(self, module: str, symbol: str) -> bool:
        if symbol in STRUCTURE.get(module, ()) or symbol in VALUES.get(module, ()):
            return True
        if module == "torch":  # dtypes and built-in activations; their kind is checked after the import
            return symbol.isidentifier() and not symbol.startswith("_")
        if covers(self.trusted, module, symbol):
            return True
        return covers(DEFAULT_ALLOWED, module, symbol) and not covers(_LEFT_OUT, module, symbol)

    def allows_value(self, value: Any) -> bool:
        # Accepts a class or function in its own module, or a constant that fiddle writes by this name. A name that a
        # module merely imports (`os.system` in an allowed module) is neither.
        if wire.constant_name(value) is not None:
            return True
        if isinstance(value, type) and (value.__module__ in STRUCTURE or is_value_type(value)):
            return True
        module = inspect.getmodule(value)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return module is not None and self.allows_import(module.__name__, name) and module.__name__ != "torch"

    def check_name(self, module: Any, symbol: Any, reason: str = _NOT_LISTED) -> None:
        """Raise SecurityError for a name that isn't on the list. Imports nothing."""
        if not isinstance(module, str) or not isinstance(symbol, str) or not self.allows_import(module, symbol):
            raise self.refusal(module, symbol, reason)

    def load(self, module: str, symbol: str, reason: str = _NOT_LISTED) -> Any:
        """The object that ``module`` calls ``symbol``, in which dots lead into classes.

        Raises:
            SecurityError: the name isn't on the list, and nothing was imported for it; or the module merely imports what
                the name stands for.
            ImportError, AttributeError: there is no such object.
        """
        self.check_name(module, symbol.partition(".")[0], reason)
        value: Any = importlib.import_module(module)
        for step in symbol.split("."):
            value = getattr(value, step)
        if not isinstance(value, enum.Enum) and not self.allows_value(value):
            raise self.refusal(module, symbol, reason if reason != _NOT_LISTED else _NOT_ITS_OWN)
        return value

    def check(self, recipe: Any) -> None:
        """Raise SecurityError if something that isn't made for recipes would be called: when this recipe is built,
        or later by the receivers of its values."""
        # Checks the stored values rather than the signatures, because building passes on every stored value.
        pending: list[tuple[str, Any, str]] = [("", recipe, "")]
        seen: set[int] = set()
        while pending:
            path, value, argument = pending.pop()
            if argument in NAMES_THAT_ARE_IMPORTED:
                self._check_named(path, value, argument)
            if argument in SWITCHES_THAT_RUN_CODE and value not in (None, False):
                self._check_switch(path, value, argument)
            if isinstance(value, fdl.Buildable):
                if id(value) not in seen:
                    self._check_target(path, value)
                    arguments = reversed(value.__arguments__.items())
                    pending.extend((f"{path}.{name}".removeprefix("."), item, str(name)) for name, item in arguments)
            elif isinstance(value, Mapping | list | tuple | set | frozenset):
                if id(value) not in seen:
                    pending.extend(_items(path, value))
            elif (isinstance(value, type) or inspect.isroutine(value)) and not self.may_be_handed_over(value):
                raise self.refusal(
                    *_name_of(value), (f"{path} passes it to other code that calls it, and it is not meant for that")
                )
            seen.add(id(value))

    def may_be_called(self, target: Any) -> bool:
        """Whether a config may call ``target``: config classes and entry points may be called, other classes of allowed
        packages and plain functions not."""
        module, name = _name_of(target)
        if covers(self.trusted, module, name) or target is dict or is_value_type(target):
            return True
        if covers(_LEFT_OUT, module, name):
            return False
        if is_configurable(target) and covers(("nemo2",), module, name):
            return True
        if not isinstance(target, type):
            return module == "torch.nn.functional"
        if hasattr(target, "__dataclass_fields__") and covers(("nemo2.models", "megatron.core"), module, name):
            return True
        return bool(_bases(target) & _CONFIG_BASES)

    def may_be_handed_over(self, value: Any) -> bool:
        """Whether a class or function may be a value in a recipe, which the receiver calls."""
        module, name = _name_of(value)
        if covers(self.trusted, module, name) or wire.constant_name(value) is not None:
            return True
        # a classmethod that creates the class, as in the specs of Megatron-Core 0.19
        if isinstance(value, types.MethodType):
            owner = value.__self__
            return isinstance(owner, type) and covers(_LAYERS, module, name) and self.may_be_handed_over(owner)
        if not isinstance(value, type):
            is_function = isinstance(value, types.FunctionType) and value.__qualname__ == value.__name__
            return is_function and covers(_FUNCTIONS, module, name) and not covers(_RESOLVERS, module, name)
        if self.may_be_called(value) or name in STRUCTURE.get(module, ()) or issubclass(value, enum.Enum):
            return True
        return not covers(_LEFT_OUT, module, name) and (
            covers(_LAYERS, module, name) or bool(_bases(value) & _VALUE_BASES)
        )

    def refusal(self, module: Any, symbol: Any, reason: str) -> SecurityError:
        """The error for one refused name."""
        return SecurityError(
            f"This recipe names {module}.{symbol}, but nemo2 does not load it: {reason}. If you know this name and "
            f"trust the file, allow it with allowed_modules=[{f'{module}:{symbol}'!r}] of from_json or from_yaml."
        )

    def _is_entry_point(self, target: Any) -> bool:
        """Whether the target is a function that starts a run, which is allowed only at a recipe's root."""
        is_function = not isinstance(target, type) and is_configurable(target)
        return is_function and not covers(self.trusted, *_name_of(target))

    def _check_target(self, path: str, node: fdl.Buildable) -> None:
        target = node.__fn_or_cls__
        # From 0.19 on Megatron-Core's specs contain its own functions with bound arguments, which are passed on rather
        # than called.
        is_function = isinstance(target, types.FunctionType | types.MethodType)
        if isinstance(node, fdl.Partial) and is_function and self.may_be_handed_over(target):
            return
        if not self.may_be_called(target) or (path and self._is_entry_point(target)):
            raise self.refusal(*_name_of(target), f"{path or 'the recipe'} would call it, and it is not meant for that")

    def _check_named(self, path: str, value: Any, argument: str) -> None:
        reason = f"{path} has it imported ({NAMES_THAT_ARE_IMPORTED[argument].partition(',')[0]})"
        for module, symbol in _dotted(value, as_pair=argument == "module"):
            self.check_name(module, symbol, reason)
            try:
                may_be_imported = self.may_be_handed_over(self.load(module, symbol, reason))
            except AttributeError:
                may_be_imported = False
            if not may_be_imported:
                raise self.refusal(module, symbol, reason)

    def _check_switch(self, path: str, value: Any, argument: str) -> None:
        name = f"{argument}={value}"
        if f"transformers:{argument}" in self.trusted:
            return
        raise SecurityError(
            f"{path} is {name}, and {SWITCHES_THAT_RUN_CODE[argument]}. nemo2 rejects this setting, because it comes "
            "from a file that somebody else may have written. If you have read that code, set the option in a recipe "
            f"of your own, or allow it with allowed_modules=['transformers:{argument}']."
        )

    def __str__(self) -> str:
        return "nemo2's recipe policy"


def has_at_most(most: int, root: Any, items: Callable[[Any], Iterable[Any]]) -> bool:
    """Whether walking a tree meets at most this many values. An object that contains itself has infinitely many.

    Args:
        items: The values in a value.
    """
    sizes: dict[int, float] = {}

    def size(value: Any) -> float:
        if id(value) not in sizes:
            sizes[id(value)] = math.inf  # until the size is known: an object that contains itself is too large
            sizes[id(value)] = 1 + sum(map(size, items(value)))
        return sizes[id(value)]

    try:
        return size(root) <= most
    except RecursionError:
        return False


def is_value_type(target: Any) -> bool:
    """Whether ``target`` is one of `VALUES`."""
    return getattr(target, "__qualname__", None) in VALUES.get(getattr(target, "__module__", None) or "", ())


def covers(allowed: Iterable[str], module: str, symbol: str) -> bool:
    """Whether the allowed prefixes and `module:symbol` names include a symbol."""
    for entry in allowed:
        prefix, _, only = entry.partition(":")
        if only:
            if module == prefix and symbol == only:
                return True
        elif module == prefix or module.startswith(f"{prefix}."):
            return True
    return False


def _dotted(value: Any, *, as_pair: bool) -> Iterator[tuple[Any, Any]]:
    """The ``(module, name)`` pairs that an argument of `NAMES_THAT_ARE_IMPORTED` names. Empty for an object.

    Args:
        as_pair: Read any sequence of two as one pair, as Megatron-Core does. Otherwise a list holds dotted names.
    """
    if isinstance(value, fdl.Buildable):
        value = value.__arguments__ if value.__fn_or_cls__ is dict else None
    if isinstance(value, str):
        module, _, symbol = value.rpartition(".")
        yield module, symbol
    elif isinstance(value, Iterable) and not isinstance(value, type | bytes):
        items = list(value)
        if as_pair:
            yield (items[0], items[1]) if len(items) == 2 else (None, items)
        else:
            for item in items:
                yield from _dotted(item, as_pair=False)


def _items(path: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}[{key!r}]", item, str(key)
            yield f"{path}[{key!r}]", key, ""
    else:
        yield from ((f"{path}[{index}]", item, "") for index, item in enumerate(value))


def _bases(target: type) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in target.__mro__}


def _name_of(target: Any) -> tuple[str, str]:
    return getattr(target, "__module__", None) or "", getattr(target, "__qualname__", None) or repr(target)


def named_object(text: str) -> Any:
    """The class or function that `module.name` or `module:name` names, if recipes may use it.

    Raises:
        WrongType: there is none, or it isn't on the allow-list.
    """
    policy = RecipePolicy()
    module, _, symbol = text.partition(":") if ":" in text else text.rpartition(".")
    if not module or not symbol or not re.fullmatch(r"[\w.]+", text.replace(":", ".")):
        raise WrongType(f"takes the dotted name of a class or function, not {text!r}")
    if not policy.allows_import(module, symbol):
        raise WrongType(f"cannot be {text!r}: a name given as text must come from nemo2, Megatron-Core or torch")
    try:
        return policy.load(module, symbol)
    except (ImportError, AttributeError) as error:
        raise WrongType(f"cannot be {text!r}: this name does not exist") from error
    except SecurityError as error:
        raise WrongType(f"cannot be {text!r}, which is not a class or function of {module}") from error
