# SPDX-License-Identifier: Apache-2.0
"""Nothing dead: whatever is a public argument has a reader or a refusal."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from tools import rooms

DOORS = ("nemo2", "nemo2.callbacks", "nemo2.data", "nemo2.llm", "nemo2.models", "nemo2.overlap")
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
    ("GPTOSSConfig",): "Megatron-Core reads it where its version knows YaRN",
    (
        "PolynomialDecayAnnealingScheduler",
        "cycle",
    ): f"{NEMO}; every schedule ends with its run, so nothing is left to stretch",
    ("MegatronCheckpointIO", "load_directly_on_device"): f"{NEMO}; Megatron-Core reads into the tensors it is given",
    ("ModelCheckpoint", "enable_version_counter"): NEMO,
    ("GPTConfig", "use_transformer_engine_full_layer_spec"): NEMO,
    ("GPTConfig126M", "use_transformer_engine_full_layer_spec"): NEMO,
    **{(f"Gemma3Config{size}", "is_vision_language"): NEMO for size in ("", "4B", "12B", "27B")},
}
"""Arguments that do nothing, and why each is there all the same."""


def test_every_public_argument_has_a_reader_or_a_refusal() -> None:
    dead = {(what.__name__, name) for what in public() for name in unread(what)}
    assert dead - NOBODY_READS.keys() == set(), "read the argument, refuse it, or take it away"
    given = {(what.__name__, name) for what in public() for name in inspect.signature(what).parameters}
    assert NOBODY_READS.keys() & given <= dead, "no longer dead: take it off the list"


def public() -> list[Any]:
    """Functions and classes of ours that the front doors name, and every configurable class beside them."""
    found = {name: getattr(import_module(door), name) for door in DOORS for name in import_module(door).__all__}
    for module, file in rooms.modules().items():
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
        return _unread_of(what)
    if dataclasses.is_dataclass(what) and "def __init__(" not in inspect.getsource(what):
        return [name for name in _own_fields(what) if name not in read_anywhere()]
    maker = what.__dict__.get("__init__")
    return _unread_of(maker) if maker is not None else []


def _unread_of(function: Callable[..., Any]) -> list[str]:
    """Arguments that the body neither uses nor keeps in an attribute that somebody reads."""
    function = inspect.unwrap(function)
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
        if uses.count(name) == 0 or (uses.count(name) == 1 and name in kept and kept[name] not in read_anywhere())
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


@cache
def read_anywhere() -> frozenset[str]:
    """Attributes that some line of the package reads, by name, and names in strings that are no docstrings: ``getattr``,
    tables of fields."""
    found = set()
    for file in rooms.modules().values():
        tree = ast.parse(file.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found.add(node.value)
    return frozenset(found)


def test_dead_arguments_are_found() -> None:
    class Example:
        def __init__(self, used: int, kept: int, forgotten: int, ignored: int) -> None:
            self.twice = 2 * used
            self.name = kept
            self.nobody_looks_at_this_attribute_ = forgotten

    @dataclasses.dataclass
    class Fields:
        path: str
        nobody_looks_at_this_field_: int

    assert unread(Example) == ["forgotten", "ignored"]
    assert unread(Fields) == ["nobody_looks_at_this_field_"]
