# SPDX-License-Identifier: Apache-2.0
"""Replacing attributes: everywhere they were copied to, and back."""

import sys
import types

import pytest

from nemo2.base.backend.patching import Patch, Patcher
from nemo2.base.errors import RuntimeFault

SOURCE = """
FLAG = True

def f():
    return "original"

class Thing:
    @staticmethod
    def make():
        return "thing"

    def method(self):
        return f()
"""


@pytest.fixture
def package(monkeypatch):
    """A package `pretend` with a module `a`, and a module `b` that copied from it at import."""
    modules = {name: types.ModuleType(name) for name in ("pretend", "pretend.a", "pretend.b")}
    exec(compile(SOURCE, "a.py", "exec"), modules["pretend.a"].__dict__)
    modules["pretend.a"].Thing.__module__ = "pretend.a"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    a, b = modules["pretend.a"], modules["pretend.b"]
    b.renamed, b.FLAG = a.f, a.FLAG
    return types.SimpleNamespace(a=a, b=b)


def patch(name: str, replacement, **more) -> Patch:
    return Patch(target=f"pretend.a:{name}", replacement=replacement, why="a test", **more)


def test_copies_follow_and_undo_restores_them(package):
    patcher = Patcher(rebind_in=["pretend"])
    patcher.apply([patch("f", lambda: "replaced")])
    assert package.a.f() == package.b.renamed() == package.a.Thing().method() == "replaced"
    patcher.undo()
    assert package.a.f() == package.b.renamed() == package.a.Thing().method() == "original"


def test_a_wrapper_is_given_the_original(package):
    Patcher(rebind_in=[]).apply([patch("f", lambda original: original() + "!", wraps=True)])
    assert package.a.f() == "original!"
    assert package.b.renamed() == "original"


def test_a_constant_is_replaced_where_it_is_named_and_nowhere_else(package):
    Patcher(rebind_in=["pretend"]).apply([patch("FLAG", False)])
    assert (package.a.FLAG, package.b.FLAG) == (False, True)


def test_static_methods_come_back_as_such(package):
    patcher = Patcher(rebind_in=[])
    patcher.apply([patch("Thing.make", staticmethod(lambda: "other"))])
    assert package.a.Thing().make() == "other"
    patcher.undo()
    assert package.a.Thing().make() == "thing"


def test_rebinding_by_choice_reaches_classes(package):
    patcher = Patcher(rebind_in=["pretend"])
    method = package.a.Thing.method
    patcher.apply([], choose=lambda value: (lambda self: "chosen") if value is method else value)
    assert package.a.Thing().method() == "chosen"
    patcher.undo()
    assert package.a.Thing.method is method


def test_a_replacement_that_was_replaced_in_turn_leaves_no_copy(package):
    patcher = Patcher(rebind_in=["pretend"])
    patcher.apply([patch("f", lambda: "first"), patch("f", lambda original: original() + " last", wraps=True)])
    assert package.a.f() == package.b.renamed() == "first last"
    patcher.undo()
    assert package.a.f() == package.b.renamed() == "original"


def test_versions_decide(package):
    patcher = Patcher(rebind_in=[])
    patcher.apply([patch("f", lambda: "new", versions=">=0.19"), patch("FLAG", 0, versions="<0.19")], version="0.16.1")
    assert (package.a.f(), package.a.FLAG) == ("original", 0)


def test_a_target_that_is_gone_is_named(package):
    with pytest.raises(RuntimeFault, match=r"pretend\.a:Thing\.gone \(a test\)"):
        Patcher(rebind_in=[]).apply([patch("Thing.gone", None)])
    with pytest.raises(RuntimeFault, match="no such attribute"):
        Patcher(rebind_in=[]).apply([Patch(target="pretend.c:f", replacement=None, why="a test")])


def test_what_may_be_absent_is_added_and_removed_again(package):
    patcher = Patcher(rebind_in=[])
    patcher.apply([patch("extra", None, may_be_absent=True)])
    assert package.a.extra is None
    patcher.undo()
    assert not hasattr(package.a, "extra")
