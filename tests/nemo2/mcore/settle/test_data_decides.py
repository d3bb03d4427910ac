# SPDX-License-Identifier: Apache-2.0
"""What a model takes over from its data, and what gives way for it."""

import pytest

from nemo2 import Config, llm
from nemo2.config.provenance import adjustments
from nemo2.data.tokenizer import ByteTokenizer, NullTokenizer
from nemo2.mcore.settle import Machine, settle
from nemo2.training.connecting import connect_parts
from support import small_runs

SIZES = {"seq_length": 512, "global_batch_size": 16, "micro_batch_size": 1}


def settled(data=None, **model):
    recipe = llm.llama3_8b.pretrain_recipe()
    if data is not None:
        recipe.data = data
    for name, value in model.items():
        setattr(recipe.model.config, name, value)
    assert recipe.strategy.ddp_config.average_in_collective
    return settle(recipe, Machine())


def test_each_token_counts_the_same_where_samples_have_masks():
    found = settled(Config(llm.SquadDataModule, **SIZES))
    assert found.value("model.config", "calculate_per_token_loss") == (True, True)
    assert found.value("model.config", "seq_length") == (True, 512)
    assert found.value("trainer.strategy.ddp", "average_in_collective") == (True, False)
    [step] = found.steps("model.config", "calculate_per_token_loss")
    assert step.why == "data is a SquadDataModule: each token counts the same"
    [step] = found.steps("trainer.strategy.ddp", "average_in_collective")
    assert step.why == "model.config.calculate_per_token_loss" and not found.refusals


def test_what_was_set_on_the_model_stays():
    found = settled(Config(llm.SquadDataModule, **SIZES), calculate_per_token_loss=False)
    assert found.value("model.config", "calculate_per_token_loss") == (True, False)
    assert found.value("trainer.strategy.ddp", "average_in_collective") == (True, True)


def test_data_for_pre_training_decides_nothing_but_the_length():
    found = settled()
    assert found.value("model.config", "calculate_per_token_loss") == (True, False)
    assert found.value("trainer.strategy.ddp", "average_in_collective") == (True, True)


@pytest.mark.parametrize("set_to, loss", [(None, True), (False, False)])
def test_live_parts_are_connected_alike(set_to, loss):
    model = small_runs.build_llama(**({} if set_to is None else {"calculate_per_token_loss": set_to}))
    connect_parts(model, llm.HFDatasetDataModule([], seq_length=small_runs.SEQ), tokenizer=None)
    assert model.config.calculate_per_token_loss is loss
    assert ("calculate_per_token_loss" in adjustments(model.config)) is loss


def test_a_model_without_a_tokenizer_leaves_the_data_its_own():
    """`llm.finetune` asks for the model's."""
    model, data = (
        small_runs.build_llama(),
        llm.HFDatasetDataModule([], tokenizer=ByteTokenizer(), seq_length=small_runs.SEQ),
    )
    connect_parts(model, data, tokenizer="model")
    assert isinstance(data.tokenizer, ByteTokenizer) and model.tokenizer is data.tokenizer
    other = llm.HFDatasetDataModule([], tokenizer=NullTokenizer(8), seq_length=small_runs.SEQ)
    connect_parts(model, other, tokenizer="model")
    assert other.tokenizer is data.tokenizer
