# SPDX-License-Identifier: Apache-2.0
"""Recipes from outside this package: files that a user names, folders in ``$NEMO2_RECIPES``, and installed packages.

A file is a recipe like those here: it states a ``RECIPE``, or defines ``pretrain_recipe()``, or both. For fine-tuning
it has ``FINETUNE`` or ``finetune_recipe()``. A package announces its recipes in the entry-point group
``nemo2.recipes``, as a module (``mine = "my_package.mine"``) or as a name in one (``mine =
"my_package.recipes:MINE"``). A file accepts the same suffix (``recipes.py:MINE``).

Importing a file or package runs it. This is the user's own code, selected by path, by variable or by installation.
Nothing else is imported. The names in a recipe must be importable in the run's processes too. A file is therefore
imported by its own name, with its folder on the path after installed packages, here and in the run's processes. For
other machines, use a package.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Optional

import nemo2
from nemo2.base.errors import ConfigError
from nemo2.base.import_path import add_own_folder
from nemo2.base.names import did_you_mean
from nemo2.recipes._assembler import PretrainRecipe
from nemo2.recipes._finetuning import FinetuneRecipe
from nemo2.recipes._shipped import names

ENTRY_POINTS = "nemo2.recipes"
VARIABLE = "NEMO2_RECIPES"
"""The variable with folders and files, separated as in ``$PATH``. A folder stands for each of its ``*.py`` files
without a leading underscore."""

_loaded: dict[Path, ModuleType] = {}


class Source(NamedTuple):
    """The source of a user's own recipe, before anything is imported."""

    name: str
    origin: str
    """The file, or the distribution that announces the recipe."""
    load: Callable[[], "OwnRecipe"]


@dataclass(frozen=True)
class OwnRecipe:
    """A user's recipe with the interface of a module here. ``home`` defines the names."""

    origin: str
    RECIPE: Optional[PretrainRecipe]
    """The recipe's facts. None: it only has functions."""
    home: Any

    def model(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("model", args, kwargs)

    def trainer(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("trainer", args, kwargs)

    def pretrain_recipe(self, *args: Any, **kwargs: Any) -> Any:
        """The configured run.

        Raises:
            ConfigError: the user's function fails, or returns something else.
        """
        return self._recipe("pretrain_recipe", args, kwargs)

    def finetune_recipe(self, *args: Any, **kwargs: Any) -> Any:
        """The configured run of fine-tuning. Raises the errors of `pretrain_recipe`."""
        return self._recipe("finetune_recipe", args, kwargs)

    @property
    def FINETUNE(self) -> Optional[FinetuneRecipe]:
        """The facts of fine-tuning. None: the recipe states none."""
        facts = getattr(self.home, "FINETUNE", None)
        return facts if isinstance(facts, FinetuneRecipe) else None

    def _recipe(self, name: str, args: Any, kwargs: Any) -> Any:
        from nemo2.config import Partial

        recipe = self._call(name, args, kwargs)
        if not isinstance(recipe, Partial):
            entry = name.removesuffix("_recipe")
            raise ConfigError(
                f"{self.origin}: {name}() returned {type(recipe).__name__}, but a recipe is a nemo2.Partial of "
                f"llm.{entry}. Return one, as the functions of shipped recipes do."
            )
        return recipe

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        holders = (self.home, self.RECIPE, self.FINETUNE)
        function = next(
            (candidate for holder in holders if (candidate := getattr(holder, name, None)) is not None), None
        )
        if function is None:
            facts = "FINETUNE" if name == "finetune_recipe" else "RECIPE"
            raise ConfigError(f"{self.origin} defines neither {name}() nor {facts} with that function.")
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            lines = [frame.lineno for frame in _frames(error) if Path(frame.filename).name == Path(self.origin).name]
            if not lines:
                raise
            raise ConfigError(f"{self.origin}:{lines[-1]}: {error}", rule=error.rule, rules=error.rules) from error
        except Exception as error:
            raise ConfigError(f"{self.origin}: {name}() failed with {_error_with_line(error)}") from error


def sources() -> tuple[dict[str, Source], list[str]]:
    """Every recipe outside this package by name, and a line for each that can't be reached by name.

    A shipped recipe's name always means the shipped recipe. Among others of the same name, the first in
    ``$NEMO2_RECIPES`` counts, then the first package.
    """
    by_name: dict[str, Source] = {}
    problems: list[str] = []
    for source in (*_from_variable(problems), *_from_packages()):
        if source.name in names():
            problems.append(f"{source.origin}: {source.name!r} is the name of a shipped recipe. Choose another name.")
        elif source.name in by_name:
            problems.append(
                f"{source.origin}: {source.name!r} is already the name of {by_name[source.name].origin}. Choose another "
                "name."
            )
        else:
            by_name[source.name] = source
    return by_name, problems


def trusted_modules() -> list[str]:
    """The user's own modules that a recipe in JSON may name: those that announce recipes, and those loaded by path.

    Files of ``$NEMO2_RECIPES`` become importable.
    """
    modules = [entry.module for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    for source in _from_variable([]):
        file = Path(source.origin).resolve()
        add_own_folder(file.parent)
        modules.append(file.stem)
    return [*dict.fromkeys([*modules, *(module.__name__ for module in _loaded.values())])]


def is_path(name: str) -> bool:
    """Whether the text in place of a recipe's name is a file."""
    return name.endswith(".py") or ".py:" in name or os.sep in name


def load_path(path: str) -> OwnRecipe:
    """The recipe in a file, ``file.py`` or ``file.py:NAME``.

    Raises:
        ConfigError: there is no such file, it can't be imported, or it is no recipe.
    """
    file, colon, name = path, "", ""
    if ".py:" in path:
        file, colon, name = path.rpartition(":")
    return _recipe(_import_file(Path(file)), name if colon else None, origin=path)


def _from_variable(problems: list[str]) -> Iterator[Source]:
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(text).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.glob("*.py") if not file.name.startswith("_"))
        elif path.is_file():
            files = [path]
        else:
            problems.append(f"${VARIABLE} names {text}, which does not exist.")
            continue
        for file in files:
            yield Source(file.stem, str(file), lambda file=file: load_path(str(file)))


def _from_packages() -> Iterator[Source]:
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist is not None else entry.module

        def load(entry: Any = entry, package: str = package) -> OwnRecipe:
            origin = f"{entry.name} of {package}"
            with_name = getattr(entry, "attr", "") or None
            return _recipe(_imported(entry.module, origin), with_name, origin=origin)

        yield Source(entry.name, package, load)


def _recipe(module: ModuleType, name: Optional[str], *, origin: str) -> OwnRecipe:
    home: Any = module
    if name is not None:
        if not hasattr(module, name):
            public = [var for var in vars(module) if not var.startswith("_")]
            raise ConfigError(f"{origin}: {module.__name__} has no {name!r}{did_you_mean(name, public)}")
        value = getattr(module, name)
        home = SimpleNamespace(**{"RECIPE" if isinstance(value, PretrainRecipe) else "pretrain_recipe": value})
    facts = getattr(home, "RECIPE", None)
    if facts is not None and not isinstance(facts, PretrainRecipe):
        raise ConfigError(f"{origin}: RECIPE is a {type(facts).__name__}, but must be a PretrainRecipe.")
    functions = ("pretrain_recipe", "finetune_recipe")
    if facts is None and not any(callable(getattr(home, function, None)) for function in functions):
        raise ConfigError(
            f"{origin} is not a recipe: it has neither RECIPE (a PretrainRecipe) nor a function pretrain_recipe()."
        )
    return OwnRecipe(origin, facts, home)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: this file does not exist.")
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no recipe: a recipe in Python ends in .py.")
    path = path.resolve()
    if path in _loaded:
        return _loaded[path]
    if not path.stem.isidentifier():
        raise ConfigError(
            f"{path.name} cannot be imported in the run's processes. Give the file the name of a Python module, for "
            f"example {''.join(c if c.isalnum() else '_' for c in path.stem)}.py."
        )
    name = _module_name(path)
    add_own_folder(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {_error_with_line(error)}") from error
    _loaded[path] = module
    return module


def _module_name(path: Path) -> str:
    """The file's own name. A second file of the same name gets a number, and its definitions are only valid in this
    process.

    Raises:
        ConfigError: in the run's processes this name would be another module.
    """
    name, others = path.stem, {module.__name__ for module in _loaded.values()}
    if name in others:
        return next(numbered for number in range(2, 1000) if (numbered := f"{name}_{number}") not in others)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or (spec.origin is not None and Path(spec.origin).resolve() == path):
        return name
    raise ConfigError(
        f"{path}: the run's processes would import the installed module {name!r} ({spec.origin}) instead. Rename the "
        "file."
    )


def _imported(module: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{origin}: {module} cannot be imported: {_error_with_line(error)}") from error


def _error_with_line(error: BaseException) -> str:
    """The error, and the innermost line of the user's code in its traceback: neither of installed packages nor of nemo2."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})."
    frames = _frames(error)
    libraries = (sysconfig.get_path("stdlib"), str(Path(__file__).parent), str(Path(nemo2.__file__).parent))
    users = [
        frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(libraries)
    ] or frames
    where = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {str(error).removesuffix('.')}{where}."


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the error's traceback, without this module's and imports'."""
    here = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename not in here and not frame.filename.startswith("<")]
