# SPDX-License-Identifier: Apache-2.0
"""What versions of Transformer Engine answered to steps in each number format (`tests/transformer_engine/steps.py`),
and what we do about it."""

import base64
import functools
import json
import os
import zlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import safe_globals
from megatron.core.transformer.enums import AttnBackend
from packaging.version import Version
from torch import nn

from nemo2 import recipes
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.untrusted import refuse_code_in_extra_states
from nemo2.config import apply_overrides
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel
from nemo2.mcore.parallel.sharded_state import states_may_be_unpickled
from nemo2.mcore.precision import BLOCKS, MegatronMixedPrecision, what_is_lacking
from nemo2.mcore.settle import Machine
from nemo2.preflight.checks.find import find
from support.nightly import each_case
from tools import te_calls

TABLES = te_calls.tables()
OLDEST, NEWEST = min(TABLES, key=Version), max(TABLES, key=Version)
FORMATS = [
    (version, recipe)
    for version, table in TABLES.items()
    for recipe, found in table["formats"].items()
    if "step" in found
]
DEFECTS = {("2.3.0", "blockwise"), ("2.8.0", "tensorwise"), ("2.8.0", "nvfp4"), ("2.9.0", "nvfp4")}
"""What a version can't do itself: 2.3 recomputes no block scaling, 2.8 can't load the state of its attention in current scaling,
nor recompute it; before 2.17 NVFP4 isn't recomputed."""
each_format = pytest.mark.parametrize(("version", "recipe"), FORMATS)
some_formats = pytest.mark.parametrize(
    ("version", "recipe"), each_case(FORMATS, [one for one in FORMATS if one[0] == NEWEST])
)


def of_versions(kind: str, cases: Iterable[str]) -> list[Any]:
    """Each version and case of a table: by day those of the newest version, and those that the oldest answers otherwise."""
    newest, oldest = TABLES[NEWEST][kind], TABLES[OLDEST][kind]
    daily = [(NEWEST, case) for case in cases] + [(OLDEST, case) for case in cases if oldest[case] != newest[case]]
    return each_case([(version, case) for version in TABLES for case in cases], daily)


def refused(recipe: str, rule: str, *, machine: Machine, **changes: Any) -> list[str]:
    return [one.message for one in find(_in_format(recipe, **changes), machine=machine) if one.rule == rule]


@functools.cache
def _in_format(recipe: str, **changes: Any) -> Any:
    requested = recipes.get("llama3_8b").pretrain_recipe()
    plugin: Any = type(requested.trainer.plugins)(MegatronMixedPrecision, precision="bf16-mixed")
    kind, number = ("fp4", "e2m1") if recipe == "nvfp4" else ("fp8", "hybrid")
    apply_overrides(requested, [f"{path.replace('__', '.')}={value}" for path, value in changes.items()])
    setattr(plugin, kind, number)
    setattr(plugin, f"{kind}_recipe", recipe)
    requested.trainer.plugins = plugin
    return requested


@each_format
def test_a_format_that_a_version_has_goes_through_a_step(version, recipe):
    """Built, called and differentiated by Megatron-Core, with what our plugin lays into the model's configuration."""
    found = TABLES[version]["formats"][recipe]
    asked = ("step", "parameters_in_it", "recomputed")
    said = [found[key] for key in asked if found[key] is not None]
    assert said == [] or (version, recipe) in DEFECTS
    assert (found["layers_in_16_bits"] is not None) == (recipe == "delayed")


@pytest.mark.parametrize("gpu", ["8.0", "8.9", "9.0", "10.0", "12.0"])
@some_formats
def test_a_gpu_is_refused_where_the_version_refuses_it(version, recipe, gpu):
    major, _, minor = gpu.partition(".")
    machine = Machine(capability=(int(major), int(minor)), transformer_engine=version)
    ours = bool(refused(recipe, "gpu-has-the-format", machine=machine))
    theirs = TABLES[version]["formats"][recipe]["gpus"][gpu] is not None
    # Before 2.6 nothing asks, and the kernels aren't there.
    assert ours is theirs or (ours and (recipe, gpu) == ("mxfp8", "12.0"))


@pytest.mark.parametrize("cuda", ["12.4", "12.8", "12.9", "13.0"])
def test_a_cuda_is_refused_where_the_version_refuses_it(cuda):
    theirs = {
        (version, recipe): TABLES[version]["formats"][recipe]["cuda"][cuda] is None for version, recipe in FORMATS
    }
    assert {one: what_is_lacking(one[1], cuda=cuda) is None for one in FORMATS} == theirs


def test_a_rank_refuses_block_scaling_under_an_older_cuda(monkeypatch):
    machine = Machine(capability=(9, 0))
    plugin = MegatronMixedPrecision("bf16-mixed", fp8="hybrid", fp8_recipe="blockwise")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(
        ConfigError, match=r"fp8='hybrid' with recipe 'blockwise' requires CUDA 12\.9 or newer, .* for CUDA 12\.8"
    ):
        plugin.check_hardware(machine)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    plugin.check_hardware(machine)


def test_sizes_that_a_version_refuses_are_refused():
    """Our blocks are the largest of any version's: what some refuse isn't a multiple, and each multiple is taken by all."""
    for place, kind in enumerate(("tokens", "width")):
        for recipe, blocks in BLOCKS.items():
            answers = [table["formats"][recipe].get(kind, {}) for table in TABLES.values()]
            taken = [size for size in answers[-1] if all(one.get(size) is None for one in answers)]
            assert taken == [size for size in answers[-1] if int(size) % blocks[place] == 0], (recipe, kind)


@pytest.mark.parametrize("recipe", BLOCKS)
def test_a_recipe_of_other_sizes_is_refused(recipe):
    block, _ = BLOCKS[recipe]
    machine = Machine(capability=(10, 0))
    for length, told in ((block * 256 + 4, 1), (block * 256, 0)):
        said = refused(recipe, "products-in-whole-blocks", machine=machine, data__seq_length=length)
        assert len(said) == told and all(f"multiplies blocks of {block}" in one for one in said)
    [said] = refused(recipe, "products-in-whole-blocks", machine=machine, model__config__ffn_hidden_size=14344)
    assert "model.config.ffn_hidden_size=14344 is not a multiple" in said


# ---------------------------------------------------------------------------------------------------------- its states


CORES = ("0.16.1", "0.19.2")


def state_of(version: str, recipe: str, core: str) -> torch.Tensor:
    content = zlib.decompress(base64.b64decode(TABLES[version]["formats"][recipe]["state"][core]))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("core", CORES)
@some_formats
def test_a_real_state_is_found_to_be_data(version, recipe, core):
    """As the version's own code saved it under each Megatron-Core, after a step."""
    state = {"layer._extra_state": state_of(version, recipe, core)}
    named = "safe_load_from_bytes" in state["layer._extra_state"].numpy().tobytes().decode("latin-1")
    if named and not hasattr(safe_globals, "safe_load_from_bytes"):
        with pytest.raises(CheckpointError, match="Install Megatron-Core"):
            refuse_code_in_extra_states(state)
    else:
        refuse_code_in_extra_states(state)


class Layer(nn.Module):
    """Takes a state as the version does; whether it holds bytes and leave is asked for says the table."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found, self.taken = found, False

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        leave = os.environ.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") == "1"
        words = self.found["state_loaded_with_leave" if leave else "state_loaded"]
        if words is not None:
            raise RuntimeError(words)
        self.taken = True


@each_format
def test_a_state_that_the_version_refuses_is_loaded_with_the_leave_that_we_give(version, recipe, monkeypatch):
    monkeypatch.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", raising=False)
    found, state = TABLES[version]["formats"][recipe], state_of(version, recipe, CORES[0])
    if (version, recipe) == ("2.8.0", "tensorwise"):
        assert "size of tensor" in found["state_loaded_with_leave"]  # no leave helps
        return
    model = nn.ModuleDict({"layer": Layer(found)})
    live: Any = SimpleNamespace(unwrapped=[model])
    MegatronParallel.load_chunks_state_dict(live, {"module.layer._extra_state": state})
    assert model["layer"].taken  # pyright: ignore[reportAttributeAccessIssue]
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE" not in os.environ
    for key in ("state_loaded_into_16_bits", "state_of_16_bits_loaded"):
        assert found[key] is None or "Refusing to load pickled" in found[key]


def test_leave_ends_with_the_load_and_a_users_stays(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0")
    with pytest.raises(KeyError), states_may_be_unpickled():
        raise KeyError
    assert os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] == "0"


# ----------------------------------------------------------------------------------------- attention over several ranks

FIELDS_WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a window": {"window_size": (4095, 0)},
    "a learnt sink": {"softmax_type": "learnable"},
    "packed sequences": {},
}


@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a", None])
@pytest.mark.parametrize(("version", "beside"), of_versions("attention", FIELDS_WITH))
def test_what_a_version_does_not_exchange_is_refused(version, beside, way):
    module, packed = recipes.get("llama3_8b"), beside == "packed sequences"
    requested = module.finetune_recipe(packed_sequence=True) if packed else module.pretrain_recipe()
    requested.trainer.strategy.context_parallel_size = 2
    for field, value in {**FIELDS_WITH[beside], "cp_comm_type": way}.items():
        setattr(requested.model.config, field, value)
    problems = find(requested, machine=Machine(transformer_engine=version))
    ours = [one.message for one in problems if one.rule == "exchange-goes-with-the-attention"]
    words = TABLES[version]["attention"][beside][way or "p2p"]
    if beside == "a learnt sink" and words is not None and "no argument" in words:
        return  # Megatron-Core asks for the version first
    assert bool(ours) == (words is not None), (ours, words)


SETTINGS_WITH: dict[str, dict[str, Any]] = {
    "a causal mask": {},
    "a learnt sink": {"softmax_type": "learnable"},
    "a window": {"window_size": (127, 0)},
    "heads of 256": {"kv_channels": 256},
    "heads of 12": {"kv_channels": 12},
    "deterministic": {"deterministic_mode": True},
    "two context-parallel ranks, a ring": {"cp": 2, "cp_comm_type": "p2p"},
    "two context-parallel ranks, gathered": {"cp": 2, "cp_comm_type": "all_gather"},
    "two context-parallel ranks, all-to-all": {"cp": 2, "cp_comm_type": "a2a"},
    "attention in fp8": {"fp8_dot_product_attention": True},
    "fp32": {"fp32": True},
    "heads of 192, values of 128": {"recipe": "deepseek_v2_lite"},
    "packed sequences": {"packed": True},
}
OTHERWISE = {"a bias", "a mask of one's own", "dropout", "two context-parallel ranks, packed"}
"""Which no field of a recipe asks for, which refuse nothing, or which are two of the others."""


@pytest.mark.parametrize(("version", "beside"), of_versions("backends", SETTINGS_WITH))
def test_a_back_end_that_a_version_does_not_leave_is_refused(version, beside):
    left = TABLES[version]["backends"][beside]
    if left is None:
        return  # before 2.8 the sinks are refused themselves
    for name in ("flash", "fused", "unfused"):
        problems = find(_with_back_end(name, **SETTINGS_WITH[beside]), machine=Machine(transformer_engine=version))
        ours = [one.message for one in problems if one.rule == "back-end-is-left"]
        assert bool(ours) == (name not in left), (name, left, ours)
        assert all(
            f"attention_backend={name} " in one and "Set model.config.attention_backend to '" in one for one in ours
        )


@functools.cache
def _with_back_end(name: str, **changes: Any) -> Any:
    recipe = recipes.get(changes.pop("recipe", "llama3_8b"))
    packed, cp = changes.pop("packed", False), changes.pop("cp", 1)
    asked = recipe.finetune_recipe(packed_sequence=True) if packed else recipe.pretrain_recipe()
    asked.trainer.strategy.context_parallel_size = cp
    plugin: Any = type(asked.trainer.plugins)(MegatronMixedPrecision, precision="bf16-mixed")
    if changes.pop("fp8_dot_product_attention", False):
        plugin.fp8, plugin.fp8_dot_product_attention = "hybrid", True
    if changes.pop("fp32", False):
        plugin.precision = "32"
    asked.trainer.plugins = plugin
    for field, value in {**changes, "attention_backend": AttnBackend[name]}.items():
        setattr(asked.model.config, field, value)
    return asked


def test_every_case_of_the_back_ends_is_asked_or_has_its_reason():
    cases = next(iter(TABLES.values()))["backends"].keys()
    assert cases == SETTINGS_WITH.keys() | OTHERWISE


def test_layers_that_are_none_of_transformer_engines_are_refused_beside_it():
    asked = _with_back_end("local")
    told = [one.message for one in find(asked, machine=Machine()) if one.rule == "back-end-is-left"]
    assert len(told) == 1 and "attention_backend=local with Transformer Engine's layers" in told[0]
    without = Machine(transformer_engine=None, te_missing="not installed")
    assert not [one for one in find(asked, machine=without) if one.rule == "back-end-is-left"]


# ------------------------------------------------------------------------------------------------ layers as CUDA graphs


@pytest.mark.parametrize("version", TABLES)
def test_a_captured_step_of_each_format_goes_through_or_is_refused_before(version):
    found = TABLES[version]["graphs"]
    steps = ["bf16", "some layers in 16 bits", "norms recomputed", "a second run of the process"]
    steps += [recipe for recipe in BLOCKS if recipe in found]
    old = Version(version) < Version("2.6")
    for step in [*steps, "a step after their end", "these hooks, paused"]:
        assert (found[step] is not None) is old, (step, found[step])
    asked = recipes.get("llama3_8b").pretrain_recipe()
    asked.model.config.cuda_graph_impl = "transformer_engine"
    problems = [one.message for one in find(asked, machine=Machine(transformer_engine=version))]
    assert any("cuda_graph_impl='transformer_engine'" in one and "2.6 or newer" in one for one in problems) is old


@pytest.mark.parametrize("version", TABLES)
def test_preconditions_of_a_capture_are_refusals_that_we_meet(version):
    """Without these refusals the meeting of them would be no test."""
    found = TABLES[version]["graphs"]
    assert all(
        found[name] is not None
        for name in (
            "hooks that gather parameters",
            "one layer in evaluation",
            "inside torch.autocast",
            "captured twice",
        )
    )
    assert set(TABLES[version]["exchange_groups"].values()) == {None}


def test_tables_hold_all_that_was_asked():
    for table in TABLES.values():
        assert set(table["formats"]) == set(BLOCKS) and json.dumps(table["attention"])
