# SPDX-License-Identifier: Apache-2.0
"""Nodes times devices, from every spelling of `trainer.devices`: one world, whoever is asked."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.mcore.settle import Machine, World, on, settle, world_of
from nemo2.recipes import llama_tiny

SPELLINGS: list[tuple[Any, int]] = [("auto", 8), (-1, 8), ([0, 1], 2), ("2", 2), (8, 8)]
"""Values of ``trainer.devices``, and the devices of a node of H100s that they are."""


def check(recipe: Any) -> int:
    from nemo2.cli.check import judgement

    told = judgement(recipe, name="tiny", machine=Machine.named("H100"))
    assert told["problems"] == []
    return told["nodes"] * told["devices"]


def plan(recipe: Any) -> int:
    from nemo2.preflight.planner.plan import plan

    return plan(recipe, gpus="H100").gpus


def rehearse(recipe: Any) -> int:
    from nemo2.preflight.rehearse.job import rehearse

    return rehearse(recipe, gpus="H100", advice=False, check=False).num_gpus


def show_layout(recipe: Any) -> int:
    from nemo2.report.pictures.ranks import place_recipe

    return place_recipe(on(recipe, Machine())).world_size


def explain(recipe: Any) -> int:
    return settle(recipe, Machine.named("H100")).world.size


def list_recipes(recipe: Any) -> int:
    from nemo2.cli.recipe_list import row_of_tree

    return row_of_tree(recipe)["gpus"]


def launch(recipe: Any) -> int:
    from nemo2.launch.launcher import apply_shape, machine_of

    machine = machine_of(SimpleNamespace(), "H100", local=False)
    devices, nodes, _ = apply_shape(recipe, machine, devices=None, nodes=None, name=None)
    # The recipe that travels says the same, in a number or by indices.
    assert world_of(recipe, Machine.here()) == World(nodes, devices)
    return devices * nodes


@pytest.mark.parametrize(("devices", "expected"), SPELLINGS, ids=lambda value: str(value))
@pytest.mark.parametrize("asked", [check, plan, rehearse, show_layout, explain, list_recipes, launch])
def test_every_command_reads_the_same_world(asked: Any, devices: Any, expected: int) -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.devices, recipe.trainer.num_nodes = devices, 2
    recipe.data.global_batch_size = 64 * recipe.data.micro_batch_size
    assert asked(recipe) == 2 * expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [*SPELLINGS, (None, 8), ("-1", 8), (" 0, 3 ", 2), ("1,", 1), ((0, 2, 4), 3), (1, 1), (["0", "1"], 2)],
    ids=str,
)
def test_devices_are_counted_as_lightning_counts_gpus(devices: Any, expected: int) -> None:
    assert world_of(SimpleNamespace(devices=devices, num_nodes=2), Machine.named("H100")) == World(2, expected)


@pytest.mark.parametrize(
    "devices", [0, -2, True, False, 1.5, "none", "", [], [0, 0], [-1], [True], {"a": 1}, 10**12, 10**25], ids=repr
)
def test_what_is_no_number_of_devices_is_refused_with_what_would_do(devices: Any) -> None:
    from nemo2.preflight.checks import find_problems

    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.devices = devices
    with pytest.raises(
        ConfigError, match=r"trainer\.devices=.*: must be a number from 1 to 1024, a list of different indices"
    ):
        world_of(recipe, Machine())
    assert any("trainer.devices" in problem for problem in find_problems(recipe))


@pytest.mark.parametrize("nodes", [0, -1, True, "2", 10**12], ids=repr)
def test_what_is_no_number_of_nodes_is_refused(nodes: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=.*: must be a number from 1 to"):
        world_of(SimpleNamespace(devices=8, num_nodes=nodes), Machine())


@pytest.mark.parametrize(
    ("devices", "number", "expected"),
    [(8, 1152, (144, 8)), (4, 64, (16, 4)), (8, 4, (1, 4)), (3, 16, (2, 8)), ("auto", 64, (8, 8)), ([0, 1], 6, (3, 2))],
)
def test_so_many_gpus_are_spread_over_whole_nodes(devices: Any, number: int, expected: tuple[int, int]) -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.devices = devices
    spread = on(recipe, Machine.named(f"H100x{number}"))
    assert (spread.trainer.num_nodes, spread.trainer.devices) == expected
    assert recipe.trainer.devices == devices


def test_gpus_that_are_no_whole_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 GPUs are not whole nodes of 8 GPUs. Use a multiple of 8"):
        world_of(SimpleNamespace(devices=8, num_nodes=1), Machine.named("H100x12"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine of CPUs")
@pytest.mark.parametrize(("devices", "expected"), [("auto", 1), (-1, 1), ([0, 1], 2), ("2", 2), (8, 8)], ids=str)
def test_a_machine_without_gpus_runs_the_processes_that_it_says(
    devices: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo2 import Trainer

    monkeypatch.setenv("WORLD_SIZE", str(expected))
    monkeypatch.setenv("RANK", "0")
    assert world_of(SimpleNamespace(devices=devices, num_nodes=1), Machine.here()) == World(1, expected)
    trainer: Any = Trainer(devices=devices, logger=False, enable_checkpointing=False)
    assert trainer.num_devices == expected


def test_a_machine_says_what_it_is() -> None:
    assert Machine.named("h100x64").describe() == "H100"
    assert Machine().describe() == "GPUs of any kind"
    assert Machine.named("this machine") == Machine.here()
    here = Machine.here()
    assert here.describe().startswith("this machine's ") and here.local
    assert replace(Machine.named("H100"), transformer_engine=None).describe() == "H100 without Transformer Engine"


def test_a_machine_without_a_gpu_says_why_transformer_engine_is_not_used() -> None:
    if not torch.cuda.is_available():
        here = Machine.here()
        assert (here.gpu, here.model, here.transformer_engine) == (None, None, None)
        assert here.te_missing is not None and "transformer_engine" in here.te_missing


@pytest.mark.parametrize(
    ("gpu", "said"), [(None, "8 of this machine's CPUs"), ("H100", "8 H100 GPUs that this machine lacks")]
)
def test_gpus_that_were_named_for_a_dry_run_are_not_this_machines(monkeypatch, gpu, said):
    from nemo2.launch.launcher import machine_of

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_of("local", gpu, local=True).counted(8) == said
