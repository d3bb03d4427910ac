# SPDX-License-Identifier: Apache-2.0
"""The three ways to call ``pretrain_recipe`` say the same things, and every size can be said."""

import inspect
from typing import Any

import pytest
import torch

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.recipes import (
    deepseek_v3,
    gemma3_1b,
    gemma_2b,
    llama31_405b,
    mamba2_8b,
    mamba2_130m,
    nemotronh_8b,
    qwen3_30b_a3b,
    qwen25_7b,
)

# Parameters of NeMo 2.0's factories, by family.
KEYWORDS = [
    "dir",
    "name",
    "tensor_parallelism",
    "pipeline_parallelism",
    "pipeline_parallelism_type",
    "virtual_pipeline_parallelism",
    "context_parallelism",
    "sequence_parallelism",
    "num_nodes",
    "num_gpus_per_node",
    "max_steps",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "limit_test_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "val_check_interval",
    "global_batch_size",
    "micro_batch_size",
    "seq_length",
    "warmup_steps",
    "constant_steps",
    "min_lr",
    "max_lr",
    "fn",
]
MAMBA = [
    "dir",
    "name",
    "tokenizer_model",
    "num_nodes",
    "num_gpus_per_node",
    "tensor_parallelism",
    "pipeline_parallelism",
    "max_steps",
    "val_check_interval",
    "limit_test_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "seq_length",
    "gbs",
    "mbs",
    "fn",
]
NEMOTRON_H = [name for name in MAMBA if name != "tokenizer_model"]
NEMOTRON_H += ["vocab_file", "sequence_parallelism", "save_top_k", "ckpt_async_save"]
SHORT = ["dir", "name", "num_nodes", "num_gpus_per_node", "fn"]
OF_FAMILY = {
    **dict.fromkeys(("Gemma 2", "Nemotron 3", "Nemotron 4", "Qwen 2", "Qwen 2.5", "Qwen 3", "StarCoder"), KEYWORDS),
    **dict.fromkeys(("StarCoder 2",), KEYWORDS),
    "Mamba 2": MAMBA,
    "Nemotron-H": NEMOTRON_H,
    "Nemotron Nano v2": NEMOTRON_H,
    "Nemotron 3 Nano": NEMOTRON_H,
    "Gemma 3": [*SHORT, "seq_length"],
    "Phi-3": [*SHORT, "max_steps", "performance_mode"],
    "DeepSeek": SHORT,
}


def test_a_factory_takes_the_arguments_that_users_know():
    for name in recipes.names():
        module = recipes.get(name)
        known = set(inspect.signature(module.pretrain_recipe).parameters)
        assert set(OF_FAMILY.get(module.RECIPE.family, SHORT)) <= known, name
        assert module.RECIPE.performance is None or "performance_mode" in known, name
        trainer = set(inspect.signature(module.trainer).parameters)
        wanted = {"tensor_parallelism", "sequence_parallelism", "num_gpus_per_node", "max_steps", "callbacks"}
        assert wanted <= trainer, name


def test_every_keyword_reaches_its_place():
    recipe: Any = qwen25_7b.pretrain_recipe(
        dir="/runs", name="mine", tensor_parallelism=4, pipeline_parallelism=2, pipeline_parallelism_type=torch.float16,
        virtual_pipeline_parallelism=7, context_parallelism=2, sequence_parallelism=True, num_nodes=3,
        num_gpus_per_node=4, max_steps=11, precision="16-mixed", accumulate_grad_batches=5, gradient_clip_val=0.5,
        limit_test_batches=6, limit_val_batches=7, log_every_n_steps=8, val_check_interval=9, global_batch_size=24,
        micro_batch_size=3, seq_length=512, warmup_steps=13, constant_steps=14, min_lr=1e-6, max_lr=2e-4,
    )  # fmt: skip
    strategy, trainer, data, optim = recipe.strategy, recipe.trainer, recipe.data, recipe.optim
    assert (strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size) == (4, 2)
    assert (strategy.pipeline_dtype, strategy.virtual_pipeline_model_parallel_size) == (torch.float16, 7)
    assert (strategy.context_parallel_size, strategy.sequence_parallel) == (2, True)
    assert (trainer.num_nodes, trainer.devices, trainer.max_steps, trainer.accumulate_grad_batches) == (3, 4, 11, 5)
    assert (trainer.limit_test_batches, trainer.limit_val_batches) == (6, 7)
    assert (trainer.log_every_n_steps, trainer.val_check_interval) == (8, 9)
    assert trainer.plugins.precision == "16-mixed"
    assert (data.global_batch_size, data.micro_batch_size, data.seq_length) == (24, 3, 512)
    schedule = optim.lr_scheduler
    assert (optim.config.lr, optim.config.clip_grad) == (2e-4, 0.5)
    assert (schedule.warmup_steps, schedule.constant_steps, schedule.min_lr) == (13, 14, 1e-6)
    assert (recipe.log.log_dir, recipe.log.name) == ("/runs", "mine")


def test_experts_are_shared_out_as_asked():
    recipe: Any = qwen3_30b_a3b.pretrain_recipe(expert_parallelism=8)
    assert (recipe.strategy.expert_model_parallel_size, recipe.strategy.expert_tensor_parallel_size) == (8, 1)


def test_an_unknown_precision_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"precision='fp8': must be one of 'bf16-mixed', '16-mixed', '32'"):
        qwen25_7b.pretrain_recipe(precision="fp8")


def test_the_abbreviations_of_mamba_reach_their_place():
    recipe: Any = nemotronh_8b.pretrain_recipe(
        tensor_parallelism=4, sequence_parallelism=False, pipeline_parallelism=2, num_nodes=2, num_gpus_per_node=4,
        max_steps=3, val_check_interval=2, limit_test_batches=4, limit_val_batches=5, log_every_n_steps=6, save_top_k=1,
        ckpt_async_save=True, seq_length=256, gbs=16, mbs=2,
    )  # fmt: skip
    strategy, trainer, data = recipe.strategy, recipe.trainer, recipe.data
    assert (strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size) == (4, 2)
    assert (strategy.sequence_parallel, strategy.ckpt_async_save) == (False, True)
    assert (trainer.num_nodes, trainer.devices, trainer.max_steps, trainer.val_check_interval) == (2, 4, 3, 2)
    assert (trainer.limit_test_batches, trainer.limit_val_batches, trainer.log_every_n_steps) == (4, 5, 6)
    assert (data.global_batch_size, data.micro_batch_size, data.seq_length) == (16, 2, 256)
    assert recipe.log.ckpt.save_top_k == 1


def test_a_tokenizer_is_given_by_either_name_and_none_is_fetched_unasked():
    plain: Any = mamba2_130m.pretrain_recipe()
    asked: Any = mamba2_130m.pretrain_recipe(tokenizer_model="/models/tokenizer")
    assert plain.data.tokenizer is None
    assert asked.data.tokenizer.pretrained_model_name == "/models/tokenizer"
    assert nemotronh_8b.model(vocab_file="mine").tokenizer.pretrained_model_name == "mine"
    assert mamba2_130m.tokenizer().pretrained_model_name == "EleutherAI/gpt-neox-20b"
    with pytest.raises(ConfigError, match="two names of the same argument"):
        mamba2_130m.pretrain_recipe(tokenizer_model="a", vocab_file="b")
    both = {"tensor_parallelism": 4, "tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"tensor_parallelism=4 and tensor_model_parallel_size=2"):
        nemotronh_8b.finetune_recipe(**both)
    with pytest.raises(ConfigError, match="mamba2_8b: its tokenizer is not published under a name"):
        mamba2_8b.tokenizer()


def test_deepseek_v3_predicts_two_tokens_unless_told_otherwise():
    two: Any = deepseek_v3.pretrain_recipe()
    one: Any = deepseek_v3.pretrain_recipe(use_mtp=False)
    assert (two.model.config.mtp_num_layers, one.model.config.mtp_num_layers) == (1, None)
    assert (deepseek_v3.model(use_mtp=True), deepseek_v3.model()) == (two.model, one.model)
    faster: Any = deepseek_v3.pretrain_recipe(performance_mode=True)
    assert [cb.gc_interval_train for cb in faster.trainer.callbacks if hasattr(cb, "gc_interval_train")] == [60]


def test_performance_has_its_other_spelling():
    assert gemma_2b.pretrain_recipe_performance() == gemma_2b.pretrain_recipe(performance_mode=True)


def test_the_names_of_single_families_are_there():
    assert gemma3_1b.gemma3_trainer().max_steps == 10
    assert llama31_405b.trainer().strategy.account_for_loss_in_pipeline_split is True
    assert (
        llama31_405b.trainer(account_for_loss_in_pipeline_split=False).strategy.account_for_loss_in_pipeline_split
        is False
    )
