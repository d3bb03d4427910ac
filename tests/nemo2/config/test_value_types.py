# SPDX-License-Identifier: Apache-2.0
"""Values of a wrong type are found before a run, with the line that set them; values that may be right are left alone."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from lightning.pytorch import Callback

from nemo2 import llm, recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.config.value_types import misfits, type_hints
from nemo2.launch import launch
from nemo2.preflight.checks import find_problems
from nemo2.training.strategies.distillation import DistillationConfig


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
        (Callback, [Callback()], "a Callback"),
        (Union[str, Callback], 5, "text or a Callback"),
        (Union[str, Callback], ["one"], "text or a Callback"),
        (Optional[Union[list[Callback], Callback]], [None], "a Callback"),
        (list[Callback], [[Callback()]], "a Callback"),
        (Optional[str], 5, "text"),
        (Optional[Union[bool, Literal["link"]]], "no", "True or False or 'link'"),
        (int, 2.5, "a whole number"),
        (float, True, "a number"),
        (bool, 2, "True or False"),
        (Union[str, Path], 5, "a path"),
        (Optional[Callable[[int], int]], "gelu", "a function"),
        (Optional[DistillationConfig], object(), "a DistillationConfig"),
        (list[str], ["a", None], "text"),
        (Optional[list[int]], ["a"], "a whole number"),
    ],
)
def test_a_value_that_cannot_be_meant_is_found(annotation: Any, value: Any, wanted: str) -> None:
    assert takes(annotation, value) == [wanted]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, None),
        (int, 3.0),
        (int, float("inf")),
        (tuple[str, int], ("a", 1)),
        (bool, 1),
        (Union[int, str], "auto"),
        (Union[bool, Literal["link"]], "link"),
        (str, Path("corpus")),
        (Union[list[int], str, int], "auto"),
        (Union[str, Callback], "one"),
        (Union[str, int, Callback], 5),
        (Union[str, list[Callback]], [Callback()]),
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


def test_the_other_rules_wait_until_each_value_has_its_type() -> None:
    recipe: Any = llm.llama3_8b.pretrain_recipe()
    recipe.data.global_batch_size = "512"
    recipe.log.ckpt.save_top_k = "all"
    recipe.strategy.tensor_model_parallel_size = 3  # which divides nothing
    found = find_problems(recipe)
    assert [message.partition("=")[0] for message in found] == ["data.global_batch_size", "log.ckpt.save_top_k"]
    recipe.data.global_batch_size, recipe.log.ckpt.save_top_k = 512, 1
    assert find_problems(recipe) and not any(": takes " in message for message in find_problems(recipe))


@pytest.mark.parametrize("value", [5, "x", [1], []])
@pytest.mark.parametrize(
    "path", ["trainer", "trainer.strategy", "trainer.callbacks", "model", "model.config", "data", "log"]
)
def test_what_is_no_part_is_refused_where_a_part_belongs(path: str, value: Any) -> None:
    """Rules that read this part used to end in an AttributeError."""
    recipe: Any = llm.llama_tiny.pretrain_recipe()
    *owners, name = path.split(".")
    owner = recipe
    for one in owners:
        owner = getattr(owner, one)
    setattr(owner, name, value)
    found = find_problems(recipe)
    if (path, value) in (("trainer.callbacks", []), ("trainer.strategy", "x")):
        assert all("trainer.callbacks" not in message for message in found)
        return
    assert path.removeprefix("trainer.") in found[0] if path == "trainer.strategy" else path in found[0]
    with pytest.raises(ConfigError, match=name):
        launch(recipe, devices=1, dryrun=True)


def test_a_secret_in_the_wrong_place_is_not_shown() -> None:
    recipe: Any = llm.llama_tiny.pretrain_recipe()
    recipe.trainer.max_steps = "hf_" + "abcdefgh" * 4
    (message,) = find_problems(recipe)
    assert message.startswith("trainer.max_steps='...': takes a whole number") and "abcdefgh" not in message


def test_the_annotations_of_a_target_are_resolved_once_and_not_until_they_can_be() -> None:
    """fiddle resolved all of a recipe's at every look at it: a quarter of the time of a check."""

    def target(x: "Later") -> None: ...  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    assert type_hints(target) == {}
    target.__annotations__["x"] = int
    first = type_hints(target)
    assert first["x"] is int and type_hints(target) is first


@pytest.mark.parametrize("trainer", [5, "x", ["one prompt"]])
def test_a_prompt_in_the_place_of_the_trainer_is_refused_with_the_order_of_the_arguments(trainer: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^trainer=.*: takes a Trainer(.|\n)*order: generate\(path, trainer, prompts, "
    ) as error:
        llm.generate("a checkpoint", trainer)
    assert error.value.rule == "values-have-their-types"
    with pytest.raises(ConfigError) as error:
        llm.generate("a checkpoint", trainer=trainer)
    assert "order" not in str(error.value)


def test_a_call_takes_neither_none_nor_a_float_for_a_whole_number() -> None:
    with pytest.raises(ConfigError, match="(?s)random_seed=3.0: takes a whole number.*max_batch_size=None"):
        llm.generate("a checkpoint", prompts=["x"], max_batch_size=None, random_seed=3.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "changes", [{"dim": 2.5}, {"alpha": "x"}, {"target_modules": [1]}, {"dropout_position": "mid"}]
)
def test_a_call_and_a_recipe_refuse_the_same(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        llm.peft.LoRA(**changes)
    recipe: Any = llm.llama_tiny.finetune_recipe(peft_scheme="lora")
    setattr(recipe.peft, *next(iter(changes.items())))
    (message,) = find_problems(recipe)
    assert message.startswith(str(error.value).removesuffix("."))
