# SPDX-License-Identifier: Apache-2.0
"""A text that stands for a config reads as the config, and editing that sets it."""

import copy

import fiddle as fdl
import pytest

import nemo2 as nl
from nemo2 import recipes
from nemo2.config import Config
from nemo2.config.overrides import apply_overrides
from nemo2.config.reading import from_json
from nemo2.config.serialize import to_json
from nemo2.recipes import _shipped
from support.nightly import each_case


@pytest.mark.parametrize("strategy", [nl.MegatronStrategy, nl.FabricMegatronStrategy])
@pytest.mark.parametrize("explicit", [{}, {"ddp": "megatron"}])
def test_a_strategy_without_buffers_of_its_own_has_their_fields(strategy, explicit):
    config = Config(strategy, **explicit)
    before = copy.deepcopy(config)
    assert config.ddp_config.overlap_grad_sync is False and config.ddp.check_for_nan_in_grad is True
    assert config == before and dict(config.__arguments__) == explicit  # reading sets nothing
    config.ddp_config.bucket_size = 7
    for one in (config, copy.deepcopy(config), from_json(to_json(config))):
        assert one.ddp.__arguments__ == {"check_for_nan_in_grad": True, "bucket_size": 7}


@pytest.mark.parametrize(
    "name", each_case(name for name in _shipped.names() if hasattr(recipes.get(name), "finetune_recipe"))
)
def test_the_first_sentence_of_the_documentation_holds_for_every_fine_tuning_recipe(name):
    recipe = recipes.get(name).finetune_recipe()
    recipe.strategy.ddp_config.overlap_grad_sync = False
    assert recipe.trainer.strategy.ddp.overlap_grad_reduce is False


def test_the_command_line_sets_a_field_of_them_and_offers_no_text_that_is_refused():
    recipe = recipes.get("qwen2_7b").finetune_recipe()
    apply_overrides(recipe, ["strategy.ddp_config.overlap_grad_sync=false"])
    built = fdl.build(recipe.trainer.strategy)
    assert (built.ddp.overlap_grad_reduce, built.ddp.check_for_nan_in_grad) == (False, True)
    with pytest.raises(ValueError) as error:
        apply_overrides(recipe, ["strategy.ddp=torch"])
    assert "pytorch" not in str(error.value)
