# SPDX-License-Identifier: Apache-2.0
"""Every call into Transformer Engine is in the tables, and the page is written from them."""

from pathlib import Path
from typing import Any

import megatron.core
import pytest

import nemo2
from nemo2 import recipes
from nemo2.config import Config
from nemo2.mcore.precision import FP8_RECIPES, MegatronMixedPrecision
from nemo2.mcore.settle import Machine
from nemo2.preflight.checks.find import find
from nemo2.recipes._shipped import names
from tools import te_calls

TABLES = te_calls.tables()
NEWEST = TABLES[list(TABLES)[-1]]["signatures"]
CLASS_OF = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


@pytest.fixture(scope="module")
def calls() -> dict[str, set[str]]:
    """By name, the keywords that Megatron-Core and nemo2 pass."""
    roots = Path(megatron.core.__path__[0]), Path(nemo2.__path__[0])
    return {name: keywords for root in roots for name, keywords in te_calls.calls_in(root).items()}


def test_the_page_is_written_from_the_tables():
    assert te_calls.PAGE.read_text() == te_calls.page(), "run make fmt"


def test_every_call_of_megatron_core_and_ours_was_measured(calls):
    assert len(calls) > 40 and calls.keys() <= NEWEST.keys(), sorted(calls.keys() - NEWEST.keys())


def test_what_is_passed_is_a_parameter_of_some_version(calls):
    unknown = []
    for name, keywords in calls.items():
        listed = [table["signatures"][name] for table in TABLES.values() if table["signatures"].get(name)]
        known = {one.partition("=")[0] for parameters in listed for one in parameters}
        if listed and not any(one.startswith("**") for one in known):
            unknown += [f"{name}({keyword})" for keyword in keywords - known]
    assert set(unknown) <= ASKED_FIRST


ASKED_FIRST = {
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb(interleaved)",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(fp8_weights)",
}
"""Megatron-Core passes the first from 2.3 on, where the function has moved, and the second before 1.13."""


@pytest.mark.parametrize("recipe", CLASS_OF)
@pytest.mark.parametrize("version", TABLES)
def test_a_recipe_is_refused_where_the_version_has_none(version, recipe):
    has = TABLES[version]["signatures"][f"transformer_engine.common.recipe.{CLASS_OF[recipe]}"] is not None
    requested = recipes.get("llama3_8b").pretrain_recipe()
    kind, number = ("fp8", "hybrid") if recipe in FP8_RECIPES else ("fp4", "e2m1")
    settings: Any = {"precision": "bf16-mixed", kind: number, f"{kind}_recipe": recipe}
    requested.trainer.plugins = Config(MegatronMixedPrecision, **settings)
    problems = find(requested, machine=Machine(transformer_engine=version))
    found = [one.message for one in problems if "does not support this" in one.message]
    assert bool(found) is not has
    assert all(f"_recipe='{recipe}': Transformer Engine {version} does not support this" in one for one in found)


def test_no_recipe_asks_for_the_fused_operations():
    for name in names():
        config = recipes.get(name).pretrain_recipe().model.config
        assert not getattr(config, "use_transformer_engine_op_fuser", False), name
