# SPDX-License-Identifier: Apache-2.0
"""Edits that turn one recipe into another: the steps, the lines, and code that does it, run on the first."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config, Partial
from nemo2.config.codegen import run_function, same_tree
from nemo2.config.edits import describe, edits, edits_source
from support.config_samples import DDP, BigModel, Callback, LoudCallback, Mode, Model, Options, recipe, write_result
from support.nightly import daily_and_nightly


def changed() -> Any:
    tree: Any = recipe()
    tree.model = Config(Model, layers=3)
    tree.trainer.strategy.tensor_parallel = 4
    tree.trainer.strategy.ddp.bucket_size = 7
    tree.trainer.callbacks = [Config(LoudCallback), tree.trainer.callbacks[0], Config(Callback, every=3)]
    tree.trainer.callbacks[1].every = 5
    tree.options.extra = {"a": 1}
    tree.options.mode = Mode.FAST
    del tree.trainer.strategy.tensor_parallel
    return tree


def text(old: Any, new: Any, *, everything: bool = False) -> list[str]:
    steps = [step for step in edits(old, new) if everything or not step.changes_nothing]
    return [f"{mark} {line}" for mark, line in describe(steps)]


def test_what_is_shown_is_what_differs_in_effect() -> None:
    assert text(recipe(), changed()) == [
        "~ model: BigModel -> Model",
        "~   model.layers: 32 -> 3",
        "~ trainer.strategy.ddp.bucket_size: None -> 7",
        "~ trainer.strategy.tensor_parallel: 2 -> 1",
        "+ trainer.callbacks[0]: LoudCallback()",
        "+ trainer.callbacks[2]: Callback(every=3)",
        "~ trainer.callbacks[1].every: 3 -> 5",
        "~ options.extra: {} -> {'a': 1}",
    ]
    assert "~ options.mode: Mode.FAST -> Mode.FAST" in text(recipe(), changed(), everything=True)
    assert text(changed(), recipe())[4:7] == [
        "- trainer.callbacks[2]: Callback(every=3)",
        "- trainer.callbacks[0]: LoudCallback()",
        "~ trainer.callbacks[0].every: 5 -> 3",
    ]
    assert text(recipe(), recipe()) == []


def test_steps_leave_both_recipes_as_they_are() -> None:
    old, new = recipe(), changed()
    edits(old, new)
    edits_source(old, new)
    assert (old, new) == (recipe(), changed())


def test_the_code_reads_as_one_would_write_it() -> None:
    tree: Any = recipe()
    tree.trainer.max_steps = 7
    tree.trainer.callbacks.append(Config(LoudCallback, volume=3))
    del tree.trainer.strategy.tensor_parallel
    assert edits_source(recipe(), tree, name="mine", doc="Shorter and louder.") == (
        "from nemo2 import Config, Partial\n"
        "from support.config_samples import LoudCallback\n"
        "\n\n"
        "def mine(recipe: Partial) -> Partial:\n"
        '    """Shorter and louder."""\n'
        "    del recipe.trainer.strategy.tensor_parallel\n"
        "    recipe.trainer.max_steps = 7\n"
        "    recipe.trainer.callbacks.append(Config(LoudCallback, volume=3))\n"
        "    return recipe\n"
    )


def shared() -> Any:
    tree: Any = recipe()
    tree.options = [tree.trainer.strategy.ddp]
    return tree


def dictionary(**extra: Any) -> Any:
    tree: Any = recipe()
    tree.options = Config(Options, extra=extra)
    return tree


def positional() -> Any:
    tree: Any = recipe()
    tree.options = Partial(write_result, Config(Model))
    return tree


def emptied() -> Any:
    tree: Any = changed()
    tree.trainer.callbacks = []
    tree.options = None
    return tree


TREES = {
    "plain": recipe, "changed": changed, "emptied": emptied, "shared": shared, "positional": positional,
    "dictionary": lambda: dictionary(a=1, b=2), "another": lambda: dictionary(b=3, c=4),
    "nested": lambda: dictionary(b={"c": Config(DDP)}), "deeper": lambda: dictionary(b={"c": Config(DDP, dims=[1])}),
    "another function": lambda: Partial(write_result, model=Config(BigModel), callbacks=[], path=Path("a")),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second"), list(itertools.product(TREES, TREES)))
def test_the_code_run_on_the_first_gives_the_second(first: str, second: str) -> None:
    old, new = TREES[first](), TREES[second]()
    assert run_function(edits_source(old, new), "edit", copy.deepcopy(old)) == new


@pytest.mark.parametrize("names", daily_and_nightly(recipes.names()))
def test_every_recipe_turns_into_the_next_and_back_by_code(names: list[str]) -> None:
    trees = [recipes.get(name).pretrain_recipe() for name in names]
    for old, new in itertools.pairwise([*trees, trees[0]]):
        for before, after in ((old, new), (new, old)):
            assert same_tree(run_function(edits_source(before, after), "edit", copy.deepcopy(before)), after)


def test_another_function_is_no_edit_but_has_code() -> None:
    with pytest.raises(
        ConfigError,
        match=r"support.config_samples.train cannot be edited into a call of support.config_samples.write_result",
    ):
        edits(recipe(), TREES["another function"]())


def test_values_that_differ_only_in_their_type_are_an_edit():
    for before, after in (([1], [True]), ((1, 2), (1.0, 2)), ({"a": 1}, {"a": 1.0})):
        trees = (Config(dict, a=before), Config(dict, a=after))
        assert same_tree(run_function(edits_source(*trees), "edit", copy.deepcopy(trees[0])), trees[1])
