# SPDX-License-Identifier: Apache-2.0
"""The error for a field of another part names the field to write, in Python, on live objects and on the command line."""

from typing import Any

import pytest

import nemo2 as nl
from nemo2 import llm, recipes
from nemo2.config import Config
from nemo2.config.overrides import apply_overrides

FIELDS = {
    "cross_entropy_fusion_impl": "model.config.cross_entropy_fusion_impl",
    "optimizer_cpu_offload": "optim.config.optimizer_cpu_offload",
    "overlap_grad_reduce": "trainer.strategy.ddp.overlap_grad_reduce",
    "fp8_margin": "trainer.plugins.fp8_margin",
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_part_on_a_strategy(name: str) -> None:
    assert llm.GPTConfig is not None  # the parts of a script are loaded
    recipe: Any = recipes.get("llama3_8b").pretrain_recipe()

    def on_the_config() -> None:
        setattr(recipe.trainer.strategy, name, 1)

    def on_the_object() -> None:
        setattr(nl.MegatronStrategy(), name, 1)

    for write in (
        on_the_config,
        on_the_object,
        lambda: Config(nl.MegatronStrategy, **{name: 1}),
        lambda: nl.MegatronStrategy(**{name: 1}),
        lambda: apply_overrides(recipe, [f"trainer.strategy.{name}=1"]),
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)) as error:
            write()
        assert FIELDS[name].rpartition(".")[0] in str(error.value)
        assert str(error.value).count("Set ") + str(error.value).count("Write ") == 1


@pytest.mark.parametrize("name", ["ckpt_async_save", "overlap_grad_reduce", "fp8_margin"])
def test_a_field_that_only_another_class_of_this_part_has_is_not_sent_back_here(name: str) -> None:
    with pytest.raises(TypeError) as error:
        nl.FSDP2Strategy(**{name: False})
    told = str(error.value)
    assert "trainer.strategy" not in told
    assert "only MegatronStrategy has it" in told or FIELDS[name] in told


def test_a_misspelled_field_still_gets_the_nearest_names() -> None:
    recipe: Any = recipes.get("llama3_8b").pretrain_recipe()
    with pytest.raises(AttributeError, match="did you mean 'sequence_parallel'"):
        recipe.trainer.strategy.sequence_paralel = True
