# SPDX-License-Identifier: Apache-2.0
"""The pages of the reference, written from the front doors' lists of names, the commands, the recipes and the models."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nemo2.base.lazy import stub_homes
from tools.site.pages import ROOT

Names = dict[str, str]
"""Public names and the module that each is defined in."""


@dataclass(frozen=True)
class Door:
    """A package whose names are documented on a page. ``intro`` says what it is for."""

    package: str
    page: str
    intro: str
    title: str = ""
    """The package's name, unless it is said."""
    modules: tuple[str, ...] = ()
    """The modules whose names are documented, of a package without a list of public names. Empty: the package itself."""
    first: tuple[str, ...] = ()
    """Names that the page begins with."""


_OPTIM = tuple(f"nemo2.mcore.optim.{name}" for name in ("lr_scheduler", "pytorch", "distributed_fused_adam"))
_ENTRY_POINTS = ("pretrain", "finetune", "train", "validate", "generate", "evaluate", "import_ckpt", "export_ckpt")
DOORS = (
    Door("nemo2", "training", "`import nemo2 as nl`: trainer, strategies, precision, checkpoints and logging."),
    Door(
        "nemo2.models",
        "models",
        "Model classes, and a config class for each size. `nemo2.llm` exports them too.",
        "Models",
    ),
    Door("nemo2.data", "data", "Data modules, datasets and tokenizers. `nemo2.llm` exports the data modules too."),
    Door(
        "nemo2.llm",
        "llm",
        "`from nemo2 import llm`: functions that train, evaluate, convert and serve models.",
        first=_ENTRY_POINTS,
    ),
    Door("nemo2.llm.io", "llm", "`nl.io`: objects that record their arguments."),
    Door("nemo2.llm.fn", "llm", "`llm.fn`: functions that visit the modules of a model."),
    Door("nemo2.callbacks", "callbacks", "Callbacks. Add one to a recipe with `recipe.trainer.callbacks.append(...)`."),
    Door("nemo2.mcore.optim", "optim", "Learning-rate schedules and optimizers.", modules=_OPTIM),
    Door("nemo2.models.peft", "peft", "LoRA, DoRA and related methods. `llm.peft` exports them too."),
    Door("nemo2.mcore.overlap", "overlap", "Settings that overlap communication with computation."),
    Door("nemo2.launch", "launch", "Functions that start a recipe on this machine or a cluster."),
    Door("nemo2.plugins", "plugins", "Plugins that edit a recipe and its executor together."),
    Door("nemo2.training.run_dir", "run_dir", "Classes that write and read a run directory."),
    Door("nemo2.config", "config", "The tree of settings: functions that build, edit, compare, save and load it."),
    Door("nemo2.mcore.settle", "settle", "Functions that compute a recipe's settings on a machine."),
    Door("nemo2.preflight.explain", "settle", "Functions that report the origin of each setting."),
    Door("nemo2.base.backend", "settle", "The devices of a process."),
    Door("nemo2.preflight.checks", "checks", "Functions that check a recipe against all rules, before anything runs."),
    Door("nemo2.preflight.rehearse", "rehearse", "Rehearsals: jobs of any size, run on meta tensors."),
    Door("nemo2.preflight.planner", "planner", "Predictions of a job's memory and time by formula."),
    Door("nemo2.errors", "errors", "The errors that nemo2 raises.", "Errors"),
)
"""In the order in which a name that several have is documented: the first has it."""


def pages() -> dict[str, str]:
    """The reference's pages by their places in the site."""
    from tools.site import commands, recipe_list

    written: dict[str, list[str]] = {}
    told: dict[str, str] = {}
    for door in DOORS:
        lines = written.setdefault(door.page, [])
        lines += [f"{'##' if lines else '#'} {door.title or door.package}", "", door.intro, ""]
        for name, home in public_names(door).items():
            if f"{home}.{name}" not in told:
                told[f"{home}.{name}"] = f"{door.page}.md#{door.package}.{name}"
                lines += _entry(door, name, home)
    places = {f"reference/{page}.md": "\n".join(lines) for page, lines in written.items()}
    return {
        "reference/index.md": _index(told),
        "reference/model_fields.md": _model_fields(),
        "reference/commands.md": commands.page(),
        "reference/recipes.md": recipe_list.page(),
        "reference/which_gpu.md": recipe_list.page_of_gpus(),
        **places,
    }


def public_names(door: Door) -> Names:
    """The classes and functions that a door offers, with the module that each is defined in. Modules are doors themselves."""
    stub = ROOT.joinpath(*door.package.split(".")) / "__init__.pyi"
    if not stub.is_file():
        return {name: home for module in door.modules or (door.package,) for name, home in _defined_in(module)}
    names = dict.fromkeys([*door.first, *stub_homes(stub.read_text())])
    values = {name: getattr(import_module(door.package), name) for name in names}
    return {name: value.__module__ for name, value in values.items() if not inspect.ismodule(value)}


def _defined_in(module: str) -> Iterator[tuple[str, str]]:
    """The public names that a module lists or defines."""
    found = import_module(module)
    for name in getattr(found, "__all__", None) or vars(found):
        value = getattr(found, name)
        home = getattr(value, "__module__", "")
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if home == module or (hasattr(found, "__all__") and home.startswith("nemo2")):
            yield name, home


def _entry(door: Door, name: str, home: str) -> list[str]:
    value = getattr(import_module(home), name)
    if named := _named_size(value):
        return [f"## {name} {{ #{door.package}.{name} }}", "", *named, ""]
    options = ["    options:", f"      heading: '{name}'", f"      toc_label: '{name}'"]
    members = ["      members: false"] if door.page == "models" else []
    anchor = f'<span id="{door.package}.{name}"></span>`from {door.package} import {name}`'
    return [f"::: {home}.{name}", *options, *members, "", anchor, ""]


def _named_size(value: Any) -> list[str]:
    """A model's configuration: its docstring and what it sets. Empty for anything else."""
    if not _is_model_config(value):
        return []
    base = value.__mro__[1]
    is_public = base.__module__.startswith("nemo2")
    own = [one for one in dataclasses.fields(value) if one.name in vars(value).get("__annotations__", {})]
    inherited = {one.name: one for one in dataclasses.fields(base)}
    changed = [one for one in own if one.name not in inherited or _default(inherited[one.name]) != _default(one)]
    of = (
        f"[`{base.__name__}`](#nemo2.models.{base.__name__})" if is_public and base.__name__ in _model_names() else None
    )
    lines = [inspect.getdoc(value) or "", "", f"A {of or f'`{base.__name__}`'} with" if changed else f"A {of}."]
    if not changed:
        return lines
    return [*lines, "", "| field | value |", "|---|---|", *(f"| `{one.name}` | {_default(one)} |" for one in changed)]


def _is_model_config(value: Any) -> bool:
    return inspect.isclass(value) and dataclasses.is_dataclass(value) and hasattr(value, "configure_model")


def _model_names() -> Names:
    return public_names(next(door for door in DOORS if door.package == "nemo2.models"))


def _default(one: Any) -> str:
    if one.default is not dataclasses.MISSING:
        value = one.default
        text = getattr(value, "__qualname__", None) or repr(value)
    elif one.default_factory is not dataclasses.MISSING:
        text = f"{getattr(one.default_factory, '__name__', 'factory')}()"
    else:
        return "required"
    return "`" + text.replace("|", "\\|") + "`"


def _model_fields() -> str:
    """Every field of the configurations that all others derive from."""
    from nemo2 import models

    lines = [
        "# Fields of model configs",
        "",
        "This page lists every field of `model.config`, with its type and default. Most fields come from Megatron-Core's "
        "`TransformerConfig`, which documents their meaning. [Checks](../checks.md) lists which values are valid together.",
        "",
    ]
    for config in (models.GPTConfig, models.SSMConfig):
        lines += [f"## {config.__name__}", "", "| field | type | default |", "|---|---|---|"]
        lines += [f"| `{one.name}` | {_type(one.type)} | {_default(one)} |" for one in _sorted(config)]
        lines += [""]
    return "\n".join(lines)


def _sorted(config: Any) -> Iterable[Any]:
    return sorted(dataclasses.fields(config), key=lambda one: one.name)


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return "`" + text.replace("|", "\\|").replace("typing.", "") + "`"


def _index(told: dict[str, str]) -> str:
    """All names in alphabetical order, each with its page and kind."""
    lines = [
        "# Reference",
        "",
        "This page lists every public class and function. Other references: [commands](commands.md), [recipes](recipes.md), "
        "[rules](../checks.md), [environment variables and exit codes](../environment.md), and [fields of model "
        "configs](model_fields.md).",
        "",
        "| name | description | import from |",
        "|---|---|---|",
    ]
    for path, target in sorted(told.items(), key=lambda item: item[0].rpartition(".")[2].lower()):
        home, _, name = path.rpartition(".")
        package = target.partition("#")[2].rpartition(".")[0]
        lines.append(f"| [`{name}`]({target}) | {_first_sentence(home, name)} | `{package}` |")
    return "\n".join([*lines, ""])


def _first_sentence(home: str, name: str) -> str:
    paragraph = (inspect.getdoc(getattr(import_module(home), name)) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<=[.:;])\s", " ".join(paragraph.split()), maxsplit=1)[0]
    return sentence.rstrip(":;").replace("|", "\\|")
