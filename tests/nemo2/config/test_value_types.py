# SPDX-License-Identifier: Apache-2.0
"""Values of a wrong type are found before a run, with the line that set them; values that may be right are left alone."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from lightning.pytorch import Callback

from nemo2 import llm, recipes
from nemo2.checks import find_problems
from nemo2.config import Config
from nemo2.config.value_types import misfits


def takes(annotation: Any, value: Any) -> list[Any]:
    def target(x: Any) -> None: ...

    target.__annotations__["x"] = annotation
    return [wanted for _, _, wanted in misfits(target, {"x": value})]


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [
        (bool, "no", "True or False"),
        (int, "many", "a whole number"),
        (Optional[Union[int, float]], "3", "a number"),
        (float, [1.0], "a number"),
        (list[int], 4, "a list"),
        (Optional[Sequence[str]], "linear_qkv", "a list"),
        (Callback, 5, "a Callback"),
        (Optional[Union[list[Callback], Callback]], [Callback(), 5], "a Callback"),
    ],
)
def test_a_value_that_cannot_be_meant_is_found(annotation: Any, value: Any, wanted: str) -> None:
    assert takes(annotation, value) == [wanted]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, None),
        (int, 3.0),
        (bool, 1),
        (Union[int, str], "auto"),
        (Union[list[int], str, int], "auto"),
        (Literal["a", "b"], "c"),
        (Union[int, Callback], 5),
        (list[str], ("a",)),
        (Optional[Path], "corpus"),
        (Any, object()),
        (int, Config(int)),
        (Optional[Callback], Config(Callback)),
        ("NotDefinedAnywhere", "text"),
    ],
)
def test_a_value_that_may_be_right_is_left_alone(annotation: Any, value: Any) -> None:
    assert takes(annotation, value) == []


@pytest.mark.parametrize("name", ["llama3_8b", "deepseek_v3", "nemotronh_8b", "gpt_oss_20b", "llama_tiny"])
def test_no_setting_of_a_recipe_is_of_a_wrong_type(name: str) -> None:
    for factory in ("pretrain_recipe", "finetune_recipe"):
        if hasattr(recipes.get(name), factory):
            assert not [one for one in find_problems(getattr(recipes.get(name), factory)()) if ": takes " in one]


def test_check_names_the_setting_its_type_and_the_line() -> None:
    recipe = llm.llama3_8b.pretrain_recipe()
    recipe.strategy.sequence_parallel = "no"  # pyright: ignore[reportAttributeAccessIssue]
    line = inspect.currentframe().f_lineno - 1  # pyright: ignore[reportOptionalMemberAccess]
    recipe.trainer.callbacks.append(5)
    found = find_problems(recipe)
    assert f"strategy.sequence_parallel='no': takes True or False, not str (set at {__file__}:{line})." in found
    assert "trainer.callbacks[1]=5: takes a Callback, not int." in found


def test_a_value_is_judged_once() -> None:
    recipe: Any = llm.llama3_8b.pretrain_recipe()
    recipe.data.global_batch_size = "512"  # its range says more
    recipe.log.ckpt.save_top_k = "all"  # which its class can't compare with a number
    ckpt, batch = find_problems(recipe)
    assert ckpt.startswith("log.ckpt.save_top_k='all': takes a whole number, not str (set at ")
    assert batch == "data.global_batch_size='512': must be a whole number of at least 1 (a number of samples)."
