# SPDX-License-Identifier: Apache-2.0
"""A recipe written as Python builds the same tree, imports what users import, and is laid out as a formatter would."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
import torch

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config, Partial
from nemo2.config.codegen import function_source, run_function, same_tree
from nemo2.config.edits import edits_source
from support.config_samples import DDP, BigModel, Callback, Mode, Model, Options, Strategy, recipe, train
from support.nightly import daily_and_nightly


def rebuilt(tree: Any) -> Any:
    return run_function(function_source(tree), "pretrain_recipe")


def in_trainer(value: Any) -> Any:
    """A sample recipe that holds ``value`` somewhere."""
    tree: Any = recipe()
    tree.options = value
    return tree


@pytest.mark.parametrize("names", daily_and_nightly(recipes.names()))
def test_every_recipe_comes_back_equal_travels_as_the_same_text_and_needs_no_formatter(
    tmp_path: Path, names: list[str]
) -> None:
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    wire = ZlibJSONSerializer()
    for name in names:
        modes = (False, True) if recipes.get(name).RECIPE.performance is not None else (False,)
        for performance_mode in modes:
            tree = recipes.get(name).pretrain_recipe(performance_mode=performance_mode)
            source = function_source(tree, doc="The run.", header=name)
            frozen = run_function(source, "pretrain_recipe")
            assert same_tree(frozen, tree), name
            if not performance_mode:
                assert wire.serialize(frozen) == wire.serialize(tree), name
            (tmp_path / f"{name}{'_fast' if performance_mode else ''}.py").write_text(source)
    ruff = Path(sys.executable).with_name("ruff")
    for arguments in (["format", "--check"], ["check", "--select", "E4,E7,E9,F,I,UP,B,SIM,C4"]):
        done = subprocess.run([ruff, *arguments, "--isolated", "."], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 1_168_251, 1e-5, float("-inf"), "it's", 'say "no"', "a\nb\\c", b"\x00", slice(1, None, 2),
        [], [1, [2, (3,)], ()], {}, {"a": [1], "b": None}, {1: 2}, {3, 1, 2}, set(), frozenset({1}), frozenset(),
        Path("/data/run"), PurePosixPath("a/b"), timedelta(days=-1, hours=3, minutes=15, microseconds=7), timedelta(0),
        torch.bfloat16, torch.nn.functional.gelu, torch.tanh, torch.device("cuda:1"), Mode.EXACT, Model, train,
        {"long": ["a text that is rather long"] * 8},
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)  # fmt: skip
def test_every_kind_of_value_that_travels_can_be_written(value: Any) -> None:
    tree = in_trainer(value)
    again = rebuilt(tree)
    assert again == tree and same_tree(again, tree)
    assert type(again.options) is type(value)


def test_trees_are_the_same_only_with_their_types_and_what_they_share() -> None:
    one, other = in_trainer([1, {"a": 2}]), in_trainer([1.0, {"a": 2}])
    assert one == other and not same_tree(one, other)
    part = Config(DDP)
    together, apart = in_trainer([part, part]), in_trainer([Config(DDP), Config(DDP)])
    assert not same_tree(together, apart) and not same_tree(apart, together)
    assert same_tree(together, in_trainer([part, part])) and same_tree(apart, in_trainer([Config(DDP), Config(DDP)]))
    assert not same_tree(in_trainer({"a": 1}), in_trainer({"b": 1})) and not same_tree(in_trainer([]), in_trainer([1]))


def test_nodes_stay_what_they_are_nested_and_positional() -> None:
    nodes = [
        run.Config(Options, mode=Mode.EXACT), run.Partial(train), fdl.Config(Options, extra={"a": 1}),
        Partial(train, Config(Model)), Config(dict, a=1, b=[Config(DDP)]),
    ]  # fmt: skip
    tree = in_trainer(nodes)
    again = rebuilt(tree)
    assert again == tree
    assert [type(node) for node in again.options] == [type(node) for node in tree.options]


def test_a_field_whose_name_is_code_is_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "a=print('it ran'), b"
    trees = [in_trainer(Config(dict, **{odd: {"x": value}, "class": 1, "ok": 2})) for value in (1, 2)]
    assert same_tree(rebuilt(trees[0]), trees[0])
    assert same_tree(run_function(edits_source(*trees), "edit", trees[0]), trees[1])
    assert same_tree(run_function(edits_source(recipe(), trees[1]), "edit", recipe()), trees[1])
    assert capsys.readouterr().out == ""


def test_a_part_that_stands_in_two_places_still_does() -> None:
    tree: Any = recipe()
    shared = Config(DDP, bucket_size=3, dims=[1, 2])
    tree.trainer.strategy.ddp = shared
    tree.options = [shared, {"again": shared}]
    again = rebuilt(tree)
    assert again == tree
    assert again.trainer.strategy.ddp is again.options[0] is again.options[1]["again"]
    assert "    ddp = Config(DDP, bucket_size=3, dims=[1, 2])\n" in function_source(tree)


def test_live_objects_are_written_as_the_configs_that_make_them() -> None:
    tree: Any = recipe()
    tree.trainer.callbacks.append(Callback(every=9))
    assert "Config(Callback, every=9)" in function_source(tree)
    assert rebuilt(tree) == tree


def test_names_come_from_where_users_import_them() -> None:
    source = function_source(recipes.get("llama3_8b").pretrain_recipe(performance_mode=True))
    assert "from lightning.pytorch.loggers import TensorBoardLogger\n" in source
    assert "from megatron.core.optimizer import OptimizerConfig\n" in source
    assert "import nemo2 as nl\n" in source and "from nemo2 import Config, Partial, llm\n" in source
    assert "Config(llm.LlamaModel, config=Config(llm.Llama3Config8B))" in source
    assert "nl.MegatronStrategy,\n" in source


def test_two_classes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from support import config_samples

    other: Any = type("Trainer", (), {"__module__": "config_samples_twin", "__init__": lambda self: None})
    twin = type(config_samples)("config_samples_twin")
    twin.__dict__["Trainer"] = other
    monkeypatch.setitem(sys.modules, "config_samples_twin", twin)
    tree = in_trainer(Config(other))
    assert "from config_samples_twin import Trainer as Trainer_2\n" in function_source(tree)
    assert rebuilt(tree) == tree


def test_what_cannot_travel_is_refused_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"options = .*cannot be imported by name"):
        function_source(in_trainer(lambda: None))


def test_what_fits_on_a_line_stays_there() -> None:
    tree = Partial(train, model=Config(BigModel), trainer=Config(Strategy, tensor_parallel=2))
    expected = "    return Partial(\n        train,\n        model=Config(BigModel),\n"
    expected += "        trainer=Config(Strategy, tensor_parallel=2),\n    )\n"
    assert function_source(tree).endswith(expected)
    assert function_source(Partial(train)).endswith("    return Partial(train)\n")
