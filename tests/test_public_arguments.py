# SPDX-License-Identifier: Apache-2.0
"""Nothing dead: whatever is a public argument has a reader or a refusal."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from support.modules import imported_by, modules

DOORS = ("nemo2", "nemo2.callbacks", "nemo2.data", "nemo2.llm", "nemo2.models", "nemo2.mcore.overlap")
WHOLE = "Transformer Engine gets the class's fields whole (`tp_overlap_cfg._fields`)"
NEMO = "NeMo's signature has it"
NOBODY_READS: dict[tuple[str, str], str] = {
    ("BulkOverlapCfg", "set_sm_margin"): WHOLE,
    ("PipelineOverlapCfg", "set_sm_margin"): WHOLE,
    ("PipelineOverlapCfg", "fp8_buf"): WHOLE,
    ("RingExchangeOverlapCfg", "aggregate"): WHOLE,
    ("RingExchangeOverlapCfg", "set_sm_margin"): WHOLE,
    ("RingExchangeOverlapCfg", "fp8_buf"): WHOLE,
    ("PreparedData", "empty_documents"): "a result, which callers read",
    ("PreparedData", "skipped_examples"): "a result, which callers read",
    ("PreparedData", "characters"): "a result, which callers read",
    (
        "FLOPsMeasurementCallback",
        "model_name",
    ): f"{NEMO}, which picks a formula by it; here the configuration is counted",
    **{(f"Gemma3Config{size}", "is_vision_language"): NEMO for size in ("", "4B")},
}
"""Arguments that do nothing, and why each is there all the same."""
HANDED_OVER = {
    ("MegatronDataSampler", "output_log"): "nemo2.training.strategies.base",
    ("MegatronDataSampler", "decoder_seq_len"): "nemo2.training.strategies.base",
    ("MaskedTokenLossReduction", "val_drop_last"): "nemo2.training.strategies.base",
    ("GPTConfig", "tp_comm_overlap_cfg"): "nemo2.mcore.overlap.userbuffers",
    ("GPTOSSConfig", "yarn_mscale"): "nemo2.models.conversion.settings",
    ("GPTOSSConfig", "yarn_mscale_all_dim"): "nemo2.models.conversion.settings",
}
"""Arguments whose reader gets the object from Lightning or Megatron-Core, and imports nothing of its class."""


def test_every_public_argument_has_a_reader_or_a_refusal():
    dead = {(what.__name__, name) for what in public() for name in unread(what)}
    assert dead - NOBODY_READS.keys() == set(), "read the argument, refuse it, or take it away"
    given = {(what.__name__, name) for what in public() for name in inspect.signature(what).parameters}
    assert NOBODY_READS.keys() & given <= dead, "no longer dead: take it off the list"
    assert NOBODY_READS.keys() <= given, "no longer an argument: take it off the list"


def public() -> list[Any]:
    """Functions and classes of ours that the front doors name, and every configurable class beside them."""
    found = {name: getattr(import_module(door), name) for door in DOORS for name in import_module(door).__all__}
    for module, file in modules().items():
        if "@configurable" in file.read_text():
            found |= {name: value for name, value in vars(import_module(module)).items() if _is_configurable(value)}
    ours = [value for value in found.values() if str(getattr(value, "__module__", "")).startswith("nemo2.")]
    return [value for value in dict.fromkeys(ours) if isinstance(value, type) or inspect.isfunction(value)]


def _is_configurable(value: Any) -> bool:
    from nemo2.config.capture import is_configurable

    return is_configurable(value)


def unread(what: Any) -> list[str]:
    """Names of the arguments of a class or function that nothing looks at."""
    if not isinstance(what, type):
        return _unread_of(what, lambda attribute: False)
    if dataclasses.is_dataclass(what) and "def __init__(" not in inspect.getsource(what):
        # With ``arguments_of(Base, vars(self))`` those of the base are handed on.
        handed_on = inspect.signature(what.__mro__[1]).parameters if "vars(self)" in inspect.getsource(what) else ()
        return [name for name in _own_fields(what) if name not in handed_on and not is_read(what, name)]
    maker = what.__dict__.get("__init__")
    return _unread_of(maker, lambda attribute: is_read(what, attribute)) if maker is not None else []


def _unread_of(function: Callable[..., Any], is_read: Callable[[str], bool]) -> list[str]:
    """Arguments that the body neither uses nor keeps in an attribute that ``is_read``."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return []  # object's own: the class takes no arguments
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    if any(isinstance(name, ast.Name) and name.id == "locals" for name in ast.walk(node)):
        return []  # handed on, all of them
    kept = {value.id: attribute for attribute, value in _plain_stores(node)}
    uses = [name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)]
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.arg != "self"]
    return [
        name
        for name in names
        if uses.count(name) == 0 or (uses.count(name) == 1 and name in kept and not is_read(kept[name]))
    ]


def _plain_stores(function: ast.FunctionDef) -> Iterator[tuple[str, ast.Name]]:
    """``self.attribute = name``."""
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(node.value, ast.Name):  # pyright: ignore
                yield target.attr, node.value  # pyright: ignore


def _own_fields(what: type) -> list[str]:
    """Fields that this class declares and none of Megatron-Core's does: what those mean, Megatron-Core reads."""
    others = {
        name
        for base in what.__mro__
        if base is not what and not base.__module__.startswith("nemo2")
        for name in (*getattr(base, "__annotations__", {}), *getattr(base, "__dataclass_fields__", {}))
    }
    own = vars(what).get("__annotations__", {})
    return [field.name for field in dataclasses.fields(what) if field.init and field.name in own.keys() - others]  # pyright: ignore


class Read(NamedTuple):
    """A place that looks at an attribute: its module, and the classes that may own the attribute; None: any."""

    module: str
    owners: frozenset[str] | None


def is_read(what: type, attribute: str) -> bool:
    """Whether a line of the package looks at this attribute of ``what``: through ``self`` or a parameter of a class that shares
    a class of ours with ``what``, else in a module that imports one of its modules or is imported by one, over others too."""
    family = {
        one for heir in _heirs(what) for one in heir.__mro__ if one.__module__.startswith(("nemo2", "tests", __name__))
    }
    names, modules = {one.__name__ for one in family}, {one.__module__ for one in family}
    handed = HANDED_OVER.get((what.__name__, attribute))
    for read in reads().get(attribute, ()):
        if read.owners is not None:
            near = bool(read.owners & names)
        else:
            near = read.module == handed or any(
                one in _reached(read.module) or read.module in _reached(one) for one in modules
            )
        if near:
            return True
    return False


def _heirs(what: type) -> Iterator[type]:
    yield what
    for heir in what.__subclasses__():
        yield from _heirs(heir)


@cache
def _reached(module: str) -> frozenset[str]:
    """A module, and those that it imports, over others too."""
    found, todo = {module}, [module]
    while todo:
        new = _graph().get(todo.pop(), frozenset()) - found
        found |= new
        todo += new
    return frozenset(found)


@cache
def _graph() -> dict[str, frozenset[str]]:
    return {module: frozenset(imported_by(file) & modules().keys()) for module, file in modules().items()}


@cache
def reads() -> dict[str, set[Read]]:
    """Attributes that the package looks at, and names in strings that are no docstrings (``getattr``, tables of fields).

    Recipes only set, and a row of the table of domains bounds a value without using it.
    """
    found: dict[str, set[Read]] = {}
    files = {
        module: ast.parse(file.read_text())
        for module, file in modules().items()
        if not module.startswith(("nemo2.recipes", "nemo2.preflight.checks.domains"))
    }
    ours = {node.name for tree in files.values() for node in ast.walk(tree) if _is_concrete(node)}

    def visit(node: ast.AST, module: str, owner: str | None, types: dict[str, frozenset[str]]) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # prose
        if isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = {"self": frozenset({owner}), "cls": frozenset({owner})} if owner else {}
            types = types | own | _annotated(node, ours)  # pyright: ignore[reportOperatorIssue]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owners = types.get(node.value.id) if isinstance(node.value, ast.Name) else None
            found.setdefault(node.attr, set()).add(Read(module, owners))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.setdefault(node.value, set()).add(Read(module, None))
        for child in ast.iter_child_nodes(node):
            visit(child, module, owner, types)

    for module, tree in files.items():
        visit(tree, module, None, {})
    return found


def _is_concrete(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases)


def _annotated(function: ast.FunctionDef | ast.AsyncFunctionDef, ours: set[str]) -> dict[str, frozenset[str]]:
    """Parameters whose annotation names a class of ours, and no Protocol: their attributes belong to it."""
    found = {}
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        words = set(re.findall(r"\w+", ast.unparse(argument.annotation))) if argument.annotation else set()
        if words & ours and "Any" not in words:
            found[argument.arg] = frozenset(words & ours)
    return found


class Example:
    def __init__(self, used: int, kept: int, forgotten: int, ignored: int, mode: int) -> None:
        self.twice = 2 * used
        self.name = kept
        self.nobody_looks_at_this_attribute_ = forgotten
        self.output_log = mode  # which a strategy reads, of the data's sampler


@dataclasses.dataclass
class Fields:
    path: str
    nobody_looks_at_this_field_: int


def test_dead_arguments_are_found():
    assert unread(Example) == ["kept", "forgotten", "ignored", "mode"]
    assert unread(Fields) == ["path", "nobody_looks_at_this_field_"]


def test_a_reader_is_of_the_class_and_not_of_the_name():
    from nemo2.data.sampler import MegatronDataSampler

    assert is_read(MegatronDataSampler, "output_log") and not is_read(Example, "output_log")
