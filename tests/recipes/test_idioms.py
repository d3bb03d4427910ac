# SPDX-License-Identifier: Apache-2.0
"""The documented ways to edit a recipe work as they are written."""

from functools import partial
from typing import Any

import fiddle as fdl
import pytest
import torch

from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.callbacks import GarbageCollectionCallback, MegatronCommOverlapCallback, TimingCallback
from nemo2.config import Config, apply_overrides, from_json, to_json
from nemo2.models.llama import LlamaModel


@pytest.fixture
def recipe() -> Any:
    return partial(llm.llama3_8b.pretrain_recipe)(performance_mode=True)


def test_strategy_is_reached_directly_and_overlap_by_its_documented_name(recipe):
    recipe.strategy.ddp_config.overlap_grad_sync = False
    recipe.strategy.ddp_config.overlap_param_gather = False
    ddp = recipe.trainer.strategy.ddp
    assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (False, False)
    assert recipe.strategy is recipe.trainer.strategy


def test_the_overlap_callback_is_filtered_out_and_a_live_one_put_in_its_place(recipe):
    recipe.trainer.callbacks = [
        cb for cb in recipe.trainer.callbacks if not isinstance(cb, MegatronCommOverlapCallback)
    ]
    recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=False, bucket_size=1000))
    kept = [cls for cls in (TimingCallback, GarbageCollectionCallback, MegatronCommOverlapCallback)
            if sum(isinstance(cb, cls) for cb in recipe.trainer.callbacks) == 1]  # fmt: skip
    assert len(kept) == 3 and len(recipe.trainer.callbacks) == 3
    travelled = from_json(to_json(recipe))
    assert travelled.trainer.callbacks[-1] == Config(
        MegatronCommOverlapCallback, tp_comm_overlap=False, bucket_size=1000
    )


def test_a_typo_is_an_error_where_it_is_made(recipe):
    with pytest.raises(ConfigError, match="did you mean 'sequence_parallel'"):
        recipe.strategy.sequence_parallelism = True
    with pytest.raises(ConfigError, match="num_layers"):
        recipe.model.config.num_layer = 2


def test_overrides_from_the_command_line_follow_the_same_names(recipe):
    apply_overrides(
        recipe,
        [
            "trainer.max_steps=100",
            "strategy.tensor_model_parallel_size=2",
            "strategy.ddp_config.overlap_grad_sync=false",
            "optim.config.lr*=0.5",
            "model.config.params_dtype=bf16",
        ],
    )
    assert recipe.trainer.max_steps == 100
    assert recipe.trainer.strategy.tensor_model_parallel_size == 2
    assert recipe.trainer.strategy.ddp.overlap_grad_reduce is False
    assert recipe.optim.config.lr == 1.5e-4
    assert recipe.model.config.params_dtype is torch.bfloat16


def test_a_recipe_shrunk_to_a_laptop_builds_into_live_objects():
    recipe: Any = llm.llama3_8b.pretrain_recipe(num_gpus_per_node=1)
    recipe.model.config = Config(
        llm.Llama3Config8B, num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, num_query_groups=2
    )
    recipe.strategy.context_parallel_size = 1
    recipe.data.seq_length = 64
    recipe.data.global_batch_size = 2
    recipe.trainer.max_steps = 2
    call = fdl.build(recipe)
    assert isinstance(call.keywords["model"], LlamaModel)
    assert call.keywords["data"].seq_length == 64
    assert [type(cb) for cb in call.keywords["trainer"].callbacks if isinstance(cb, TimingCallback)] == [TimingCallback]
