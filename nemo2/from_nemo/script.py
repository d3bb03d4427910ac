# SPDX-License-Identifier: Apache-2.0
"""Converts a NeMo 2.0 script's imports and lists the lines to edit.

A script or notebook is read, never run. Its import statements are rewritten, arguments that NeMo ignored are removed, and
fields of other parts that it sets on the strategy are set where they live. Every other line is kept. Names are followed
through imports and through ``S = nl.MegatronStrategy``, not through calls, loops and conditions.
"""

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Optional

from nemo2.base.errors import ConfigError, UnknownNameError
from nemo2.config.aliases import aliases_of, gone, parameter_names
from nemo2.config.capture import real_names
from nemo2.from_nemo.names import find, module_of, reason_of


class Translation(NamedTuple):
    text: str
    left: list[tuple[int, str]]
    """Lines of the script to edit by hand, with the reason."""
    taken_out: list[tuple[int, str]]
    """Lines from which something without effect in NeMo was removed, or in which a field moved, and what."""


def translated(text: str) -> Translation:
    """The script with its imports rewritten, and fields that it sets on the strategy set where they live.

    Raises:
        SyntaxError: the text isn't Python.
        ConfigError: the text is only a value, such as JSON, and no script.
    """
    tree = ast.parse(text)
    if tree.body and all(isinstance(one, ast.Expr) and not isinstance(one.value, ast.Call) for one in tree.body):
        raise ConfigError(
            "this is no script: it contains only values. `nemo2 translate` reads NeMo 2.0's scripts and notebooks."
        )
    lines = text.splitlines(keepends=True)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    rewritten = {node: _rewritten(node) for node in imports}
    new_imports = [
        ast.parse("\n".join(new)).body if new is not None else [node] for node, (new, _) in rewritten.items()
    ]
    names = _bound_names(tree, [statement for statements in new_imports for statement in statements])
    moved, left = _misplaced_fields(tree, names)
    # From the end of a line to its beginning: an edit moves what stands behind it.
    edits = sorted(
        [*_without_effect(tree, names), *moved], key=lambda one: (one.node.lineno, one.node.col_offset), reverse=True
    )
    edited = [one for one in edits if _edit(lines, one)]
    left += [(one.node.lineno, one.message.replace("removed", "remove", 1)) for one in edits if one not in edited]
    for node, (written, problems) in sorted(rewritten.items(), key=lambda one: one[0].lineno, reverse=True):
        left += [(node.lineno, problem) for problem in problems]
        if written is not None:
            indent = " " * node.col_offset
            end = "\n" if lines[(node.end_lineno or node.lineno) - 1].endswith("\n") else ""
            if node.col_offset and all(line.startswith("#") for line in written):
                written = [*written, "pass"]  # a block must not be empty
            lines[node.lineno - 1 : node.end_lineno] = [indent + f"\n{indent}".join(written) + end]
    left += _unknown_attributes(tree, names, without=[one.node for one in edited])
    left += _unknown_arguments(tree, names, without=[edit.node for edit in edits])
    changed = sorted((one.node.lineno, one.message) for one in edited)
    return Translation("".join(lines), sorted(set(left)), changed)


def _rewritten(node: "ast.Import | ast.ImportFrom") -> tuple[Optional[list[str]], list[str]]:
    """The statements that replace an import, and the lines to edit. None for the statements: it doesn't import from
    NeMo or from an earlier Lightning."""
    if isinstance(node, ast.ImportFrom):
        module = "" if node.level else node.module or ""
        if (home := _of_lightning(module)) is not None:
            return [f"from {home} import {', '.join(_as(one.name, one.asname or one.name) for one in node.names)}"], []
        if not _of_nemo(module):
            names = [alias.name for alias in node.names if alias.name != "*"] if _of_nemo_run(module) else []
            return None, [f"{name}: the installed {module} has no {name}" for name in names if not _has(module, name)]
        return _of_names(node)
    if not any(_of_nemo(one.name) or _of_lightning(one.name) for one in node.names):
        return None, []
    written, problems = [], []
    for one in node.names:
        package = one.name.partition(".")[0]
        home = module_of(one.name) if _of_nemo(one.name) else _of_lightning(one.name) or one.name
        if one.asname is None and package in _LIGHTNING:
            written.append(f"import {_LIGHTNING[package]} as {package}")
        elif home is None:
            problems.append(f"import {one.name}: nemo2 has no such module")
            written.append(f"# import {one.name}")
        elif one.asname is None and home != one.name:
            problems.append(
                f"import {one.name}: use `import {home} as NAME`, and NAME instead of {one.name} in the code"
            )
            written.append(f"import {home}")
        else:
            written.append(f"import {home} as {one.asname}" if one.asname and one.asname != home else f"import {home}")
    return written, problems


def _of_names(node: ast.ImportFrom) -> tuple[list[str], list[str]]:
    by_home: dict[str, list[str]] = {}
    written: list[str] = []
    problems: list[str] = []
    for alias in node.names:
        used = alias.asname or alias.name
        if alias.name == "*":
            home = module_of(node.module or "")
            written.append(f"from {home} import *" if home else f"# from {node.module} import *")
            problems += [] if home else [f"from {node.module} import *: nemo2 has no such module"]
            continue
        home = module_of(f"{node.module}.{alias.name}")
        if home is not None:
            package, _, last = home.rpartition(".")
            if not package:
                written.append(f"import {home}" + (f" as {used}" if used != home else ""))
            else:
                by_home.setdefault(package, []).append(_as(last, used))
            continue
        inside, counterpart = module_of(node.module or ""), find(alias.name)
        if inside is not None and counterpart.status in ("gone", "unknown") and _has(inside, alias.name):
            by_home.setdefault(inside, []).append(_as(alias.name, used))
        elif counterpart.status in ("works", "renamed"):
            if counterpart.name:
                by_home.setdefault(counterpart.home, []).append(_as(counterpart.name, used))
            else:
                written.append(f"import {counterpart.home}" + (f" as {used}" if used != counterpart.home else ""))
            if counterpart.status == "renamed":
                problems.append(
                    f"{alias.name} is now {counterpart.home}.{counterpart.name}: check its arguments"
                    if counterpart.name
                    else ""
                )
        else:
            written.append(f"# from {node.module} import {alias.name}")
            reason = reason_of(f"{node.module}.{alias.name}") if counterpart.status == "unknown" else None
            problems.append(f"{alias.name}: {reason or counterpart.reason}")
    written += [f"from {home} import {', '.join(names)}" for home, names in by_home.items()]
    return written, [problem for problem in problems if problem]


def _as(name: str, used: str) -> str:
    return name if name == used else f"{name} as {used}"


_LIGHTNING = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Packages of NeMo 2.0.0's scripts whose classes, such as loggers, aren't those that nemo2's trainer knows."""


def _of_lightning(module: str) -> Optional[str]:
    """Today's name of a module of an earlier Lightning. None: it is another one."""
    package, dot, rest = module.partition(".")
    return f"{_LIGHTNING[package]}{dot}{rest}" if package in _LIGHTNING else None


def _of_nemo(module: str) -> bool:
    return module.partition(".")[0] == "nemo"


def _of_nemo_run(module: str) -> bool:
    return module.partition(".")[0] == "nemo_run"


def _has(module: str, name: str) -> bool:
    """Whether a module of nemo2's or nemo-run's has a name. The script names nemo-run's, so their sources are only read."""
    from importlib import import_module, util

    if _of_nemo_run(module) and (package := util.find_spec("nemo_run")) and package.submodule_search_locations:
        place = Path(package.submodule_search_locations[0], *module.split(".")[1:])
        sources = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
        is_module = (place / name).is_dir() or (place / f"{name}.py").is_file()
        return is_module or any(re.search(rf"\b{name}\b", file.read_text("utf-8")) for file in sources)
    try:
        return hasattr(import_module(module), name) or util.find_spec(f"{module}.{name}") is not None
    except ImportError as error:  # an optional package may be missing here
        return (error.name or module).partition(".")[0] != module.partition(".")[0]


_Names = dict[str, ast.expr]
"""What the names of a script stand for, after the translation."""


def _bound_names(tree: ast.AST, imports: list[ast.stmt]) -> _Names:
    """The dotted path of each imported name, and the value of each name that the script assigns once."""
    values = {
        id(node.targets[0]): node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1
    }
    bound: dict[str, list[Optional[ast.expr]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, []).append(values.get(id(node)))
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.setdefault(node.name, []).append(None)
    names = {name: value for name, [value, *more] in bound.items() if value is not None and not more}
    for node in imports:
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                first = alias.name if package or alias.asname else alias.name.partition(".")[0]
                if alias.name != "*":
                    names[alias.asname or first] = ast.parse(f"{package}{first}", mode="eval").body
    return names


def _resolved(node: ast.expr, names: _Names) -> ast.expr:
    """An expression with each name replaced by the dotted path that it stands for."""
    if isinstance(node, ast.Attribute):
        return ast.Attribute(_resolved(node.value, names), node.attr)
    value = names.get(node.id) if isinstance(node, ast.Name) else None
    if isinstance(node, ast.Name) and isinstance(value, ast.Name | ast.Attribute):
        return _resolved(value, {name: one for name, one in names.items() if name != node.id})
    return node


def _object(node: ast.expr, names: _Names) -> Any:
    """nemo2's module, class or function that an expression stands for. None: it stands for something else."""
    path = ast.unparse(_resolved(node, names))
    if path.partition(".")[0] != "nemo2" or not re.fullmatch(r"[\w.]+", path):
        return None
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):  # nemo2 lacks it, or an optional package is missing here
        return None


def _called(node: ast.expr, names: _Names) -> Any:
    """nemo2's class or function that a call calls, or ``run.Config``, ``run.Partial`` and ``partial`` configure. None:
    it calls another one."""
    from nemo2 import MegatronStrategy

    if not isinstance(node, ast.Call):
        return None
    configures = _last(_resolved(node.func, names)) in ("Config", "Partial", "partial")
    target = node.args[0] if configures and node.args else node.func
    # The name is enough: a part of a script may lack its imports.
    return MegatronStrategy if _last(target) == "MegatronStrategy" else _object(target, names)


def _is_strategy(node: ast.expr, names: _Names) -> bool:
    from nemo2 import MegatronStrategy

    made = names.get(node.id) if isinstance(node, ast.Name) else None
    return _last(_resolved(node, names)) == "strategy" or (
        made is not None and _called(made, names) is MegatronStrategy
    )


def _attribute_set(node: ast.AST) -> Optional[tuple[ast.expr, str]]:
    """The object and the attribute of ``setattr(object, "attribute", value)`` that stands alone."""
    call = node.value if isinstance(node, ast.Expr) else None
    match call:
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), _]):
            return owner, name
    return None


def _unknown_attributes(tree: ast.AST, names: _Names, *, without: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Uses of a module's attribute that nemo2's module lacks, such as ``nl.io`` or ``llm.deploy``."""
    for node in ast.walk(tree):
        if node in without or not isinstance(node, ast.Attribute):
            continue
        home, module = ast.unparse(_resolved(node.value, names)), _object(node.value, names)
        is_module = home == "nemo_run" or isinstance(module, ModuleType)
        if is_module and not hasattr(module, node.attr) and not _has(home, node.attr):
            counterpart = find(node.attr)
            advice = {
                "works": f"import it from {counterpart.home}",
                "renamed": f"use {counterpart.home}.{counterpart.name}",
            }.get(counterpart.status, counterpart.reason)
            yield node.lineno, f"{ast.unparse(node)}: {home} has no {node.attr}; {advice}"


def _unknown_arguments(tree: ast.AST, names: _Names, *, without: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Arguments that the class or function of nemo2 lacks."""
    for call in ast.walk(tree):
        target = _called(call, names) if isinstance(call, ast.Call) else None
        for keyword in call.keywords if isinstance(call, ast.Call) and callable(target) else ():
            try:
                if keyword.arg is not None and keyword not in without:
                    real_names(target, {keyword.arg: None})
            except UnknownNameError as error:
                yield keyword.lineno, str(error)


class _Edit(NamedTuple):
    """A part of the script that is removed or replaced."""

    node: "ast.keyword | ast.expr | ast.stmt"
    message: str
    replacement: Optional[str] = None
    """None: the part is removed."""


UNUSED_BASES = {
    "ConnectorMixin": "llm.import_ckpt and llm.export_ckpt convert the weights of every model family",
}
"""Base classes whose methods no run calls, with nemo2's replacement."""
UNUSED_ARGUMENTS = {
    "find_unused_parameters": "Megatron-Core's gradient buffers reduce every parameter",
}
"""Arguments of the strategy that NeMo passes only to torch's DDP."""


def _without_effect(tree: ast.AST, names: _Names) -> Iterator[_Edit]:
    """Arguments and attributes of the strategy that NeMo ignores, and base classes that a run doesn't need."""
    from nemo2 import MegatronStrategy

    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases if len(node.bases) > 1 else ():
                if (name := _last(base)) in UNUSED_BASES:
                    yield _Edit(base, f"removed the base class {name} of {node.name}: {UNUSED_BASES[name]}")
        elif isinstance(node, ast.Call) and _called(node, names) is MegatronStrategy:
            for keyword in node.keywords:
                name = keyword.arg or ""
                if (reason := UNUSED_ARGUMENTS.get(name) or gone(MegatronStrategy, name)) is not None:
                    yield _Edit(keyword, f"removed MegatronStrategy({name}=...): {reason}")
        elif isinstance(node, ast.Assign | ast.Expr):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=owner, attr=name) as target]):
                    shown = ast.unparse(target)
                case _:
                    if (found := _attribute_set(node)) is None:
                        continue
                    (owner, name), shown = found, ast.unparse(node)
            if _is_strategy(owner, names) and (reason := gone(MegatronStrategy, name)) is not None:
                # "pass", because the line may be all that a function or a loop has.
                yield _Edit(node, f"removed {shown}: {reason}", "pass")


def _misplaced_fields(tree: ast.AST, names: _Names) -> tuple[list[_Edit], list[tuple[int, str]]]:
    """``recipe.trainer.strategy.NAME = value`` where NAME is a field of another part of the recipe. Returns the edits that
    set it there, and the lines to edit by hand: the part can't be reached from there."""
    from nemo2 import MegatronStrategy
    from nemo2.config.homes import homes_of, load_parts

    load_parts()
    own = {*parameter_names(MegatronStrategy), *aliases_of(MegatronStrategy)}
    moved, left = [], []
    for node in ast.walk(tree):
        targets = (
            [one for one in node.targets if isinstance(one, ast.Attribute)] if isinstance(node, ast.Assign) else []
        )
        settings: list[tuple[ast.expr, ast.expr, str]] = [(target, target.value, target.attr) for target in targets]
        if (found := _attribute_set(node)) is not None:
            settings.append((found[0], *found))
        for place, owner, name in settings:
            known = not _is_strategy(owner, names) or name in own or gone(MegatronStrategy, name) is not None
            path = next(iter(homes_of(name) if not known else ()), None)
            if path is None:
                continue
            shown = f"{ast.unparse(owner)}.{name}"
            root = _recipe_of(_resolved(owner, names))
            if root is None or place.lineno != place.end_lineno:
                left.append((place.lineno, f"{shown}: the strategy has no such field; set {path} of the recipe"))
            else:
                new = f"{ast.unparse(root)}.{path}"
                part = new if place is not owner else new.removesuffix(f".{name}")
                moved.append(_Edit(place, f"{shown} is now {new}", part))
    return moved, left


def _recipe_of(strategy: ast.expr) -> Optional[ast.expr]:
    """The recipe in ``recipe.trainer.strategy`` or ``recipe.strategy``. None: the expression names none."""
    owner = getattr(strategy, "value", None)
    if isinstance(owner, ast.Attribute) and owner.attr == "trainer":
        return owner.value
    return owner if isinstance(owner, ast.Name) and "recipe" in owner.id else None


def _last(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _edit(lines: list[str], edit: _Edit) -> bool:
    """Replace a part of a line, or remove an argument or a base class with its comma. If the removed part has a line of its
    own, a comment replaces it, so that line numbers stay. Returns False, without a change, if it spans several lines."""
    node = edit.node
    if node.end_lineno != node.lineno:
        return False
    line = lines[node.lineno - 1].encode()  # ast counts columns in UTF-8 bytes
    before, own, after = (
        line[: node.col_offset],
        line[node.col_offset : node.end_col_offset],
        line[node.end_col_offset :],
    )
    if edit.replacement is not None:
        new = before + edit.replacement.encode() + after
    elif not before.strip() and after.strip() in (b"", b","):
        new = before + b"# " + own + after
    elif after.startswith(b","):
        new = before + after.removeprefix(b",").lstrip(b" ")
    else:
        new = before.rstrip(b" ").removesuffix(b",") + after
    lines[node.lineno - 1] = new.decode()
    return True
