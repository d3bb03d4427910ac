# SPDX-License-Identifier: Apache-2.0
"""Parts of a recipe by the names of their factories, on a command line and not in Python."""

from typing import Any, Optional

import fiddle as fdl
import nemo_run as run
import pytest

import nemo2 as nl
from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.config import Partial, apply_overrides, flatten, who_set
from nemo2.config.factories import factory_names, made_by_name
from nemo2.config.overrides import COMMAND_LINE
from nemo2.config.typed_text import part_classes
from nemo2.config.values import describe, typed
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler
from nemo2.mcore.optim.megatron import MegatronOptimizerModule
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.preflight.checks.find import find_problems
from nemo2.recipes import llama3_8b, llama32_1b, llama_tiny
from nemo2.recipes.log.default import default_log
from nemo2.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo2.recipes.precision import mixed_precision


def changed(*overrides: str) -> Any:
    return apply_overrides(llama_tiny.pretrain_recipe(), overrides)


@pytest.mark.parametrize("name", factory_names([MegatronMixedPrecision]))
def test_every_precision_is_reachable_by_its_name(name: str) -> None:
    recipe = changed(f"trainer.plugins={name}")
    assert recipe.trainer.plugins == getattr(mixed_precision, name)()
    assert who_set(recipe.trainer, "plugins")[-1][:2] == (COMMAND_LINE, 1)


def test_parts_are_made_by_name_and_their_arguments_are_typed() -> None:
    recipe = changed(
        "optim=distributed_fused_adam_with_cosine_annealing(max_lr=1e-4, warmup_steps=5)",
        "log=default_log(name=other)",
        "data=mock(seq_length=64, global_batch_size=4)",
        "trainer.callbacks=[TimingCallback, GarbageCollectionCallback(gc_interval_train=7, gc_interval_val=7)]",
        "trainer.callbacks[1].gc_interval_val=9",
        "log.tensorboard=tensorboard_logger(name=other)",
        "model=llama32_1b",
    )
    assert recipe.optim == distributed_fused_adam_with_cosine_annealing(max_lr=1e-4, warmup_steps=5)
    assert recipe.log.name == recipe.log.tensorboard.name == "other"
    assert recipe.log.ckpt == default_log().ckpt
    assert (recipe.data.seq_length, recipe.data.global_batch_size, recipe.data.micro_batch_size) == (64, 4, 2)
    assert (recipe.trainer.callbacks[1].gc_interval_train, recipe.trainer.callbacks[1].gc_interval_val) == (7, 9)
    assert isinstance(fdl.build(recipe.optim), MegatronOptimizerModule)
    assert recipe.model == llama32_1b.model()
    schedule = changed("optim.lr_scheduler=CosineAnnealingScheduler(warmup_steps=3, min_lr=0.0)").optim.lr_scheduler
    assert isinstance(schedule, CosineAnnealingScheduler) and schedule.warmup_steps == 3


def test_a_strategy_is_made_by_name_where_lightnings_names_are_text() -> None:
    assert isinstance(changed("strategy=FSDP2Strategy(tensor_parallel_size=2)").trainer.strategy, nl.FSDP2Strategy)
    assert [changed(f"strategy={name}").trainer.strategy for name in ("ddp", "fsdp")] == ["ddp", "fsdp"]
    with pytest.raises(ConfigError, match="did you mean 'FSDP2Strategy'"):
        changed("strategy=FSDP2Strateg")
    with pytest.raises(ConfigError, match="is text. Call .*FSDP2Strategy"):
        nl.Trainer(strategy="FSDP2Strategy", devices=1)


def test_a_bare_call_of_pretrain_is_a_recipe_once_its_parts_are_named() -> None:
    parts = [
        "model=llama_tiny",
        "trainer=llama_tiny",
        "data=mock(seq_length=128)",
        "log=default_log",
        "resume=default_resume",
    ]
    recipe = apply_overrides(Partial(llm.pretrain), parts)
    assert flatten(recipe.model) == flatten(llama_tiny.pretrain_recipe().model)
    assert find_problems(recipe) == []


def test_a_factory_registered_with_nemo_run_is_found() -> None:
    @run.cli.factory(name="mine_of_test_factories")
    @run.autoconvert
    def mine() -> OptimizerModule:
        return MegatronOptimizerModule(config=None)

    assert type(made_by_name("mine_of_test_factories", (OptimizerModule,), fit=typed)) is run.Config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "trainer.plugins=no_such_thing",
            "takes a Precision .*'no_such_thing' does not name one; known names include bf16_mixed",
        ),
        ("trainer.plugins=[no_such_thing]", "takes a Precision .*'no_such_thing' does not name one"),
        ("trainer.plugins=bf16_with_fp8_mixd", "did you mean 'bf16_with_fp8_mixed'"),
        ("trainer.callbacks=TimingCalback", "did you mean 'TimingCallback'"),
        ("optim=distributed_fused_adm", "did you mean 'distributed_fused_adam'"),
        ("model.optim=foo", "takes an OptimizerModule"),
        ("data=mok", "did you mean 'mock'"),
        ("data=mock(seq_len=4)", "mock has no parameter 'seq_len'; did you mean 'seq_length'"),
        ("data=mock(seq_length=x)", "seq_length of mock takes a whole number, not 'x'"),
        (
            "log.tensorboard=tensorboard_logger",
            r"tensorboard_logger requires name=\.\.\.\. Write tensorboard_logger\(name=",
        ),
        ("data=mock(4096)", "'4096' is not of the form name=value. Name the argument of mock"),
        ("log=nemo2.mcore.optim.base.OptimizerModule", "takes a NeMoLogger"),
        ("optim=distributed_fused_adam(bucket_cap=8)", "no parameter 'bucket_cap'; did you mean 'bucket_cap_mb'"),
        ("optim=distributed_fused_adam(bucket_cap_mb=0)", "bucket_cap_mb=0.0 must be more than 0"),
        ("trainer.no_such=1", "no_such"),
    ],
)
def test_a_name_that_makes_nothing_is_refused_with_the_nearest(override: str, words: str) -> None:
    recipe = llama_tiny.pretrain_recipe()
    before = flatten(recipe)
    with pytest.raises(ConfigError, match=words):
        apply_overrides(recipe, ["trainer.max_steps=3", "optim=distributed_fused_adam(bucket_cap_mb=8)", override])
    assert flatten(recipe) == before


@pytest.mark.parametrize("hint", [OptimizerModule, Optional[OptimizerModule], nl.LRSchedulerModule])
def test_no_abstract_class_is_ever_suggested(hint: Any) -> None:
    suggested = describe(hint)[1]
    made = made_by_name(suggested, part_classes(hint), fit=typed)
    assert isinstance(made, part_classes(hint)) or hasattr(made, "changes")


def test_text_set_in_python_is_refused_by_check_and_by_the_run() -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.plugins, recipe.optim, recipe.data = "no_such_thing", "bf16", "mock"
    recipe.trainer.callbacks.append("TimingCallback")
    told = "\n".join(find_problems(recipe))
    assert "trainer.plugins='no_such_thing': takes a Precision" in told
    assert "optim='bf16': takes an OptimizerModule" in told
    assert (
        "data='mock': takes a LightningDataModule, but 'mock' is text. Call nemo2.recipes.data.default.mock instead."
        in told
    )
    assert "trainer.callbacks='TimingCallback': takes a Callback" in told
    with pytest.raises(
        ConfigError, match="trainer.plugins='bf16_mixed'.*Call nemo2.recipes.precision.mixed_precision.bf16_mixed"
    ):
        nl.Trainer(plugins="bf16_mixed")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="optim='distributed_fused_adam': takes an OptimizerModule"):
        llm.pretrain(model=None, data=None, trainer=None, optim="distributed_fused_adam")  # pyright: ignore[reportArgumentType]


def test_documented_settings_of_the_optimizer_work_below_the_model() -> None:
    """As NeMo's documents write them: the optimizer's name and options below `model.optim`."""
    options = ("lr=2e-4", "bucket_cap_mb=8", "betas=(0.8,0.9)")
    below = [f"model.optim.{option}" for option in ("name=distributed_fused_adam", *options)]
    recipe = apply_overrides(llama3_8b.pretrain_recipe(), [*below, "optim.config.clip_grad=0.5"])
    config, ddp = recipe.optim.config, recipe.strategy.ddp_config
    assert (config.lr, config.adam_beta1, config.clip_grad, ddp.bucket_size) == (2e-4, 0.8, 0.5, 2 * 2**20)
    assert recipe.model.optim is None and who_set(ddp, "bucket_size")[-1][:2] == (COMMAND_LINE, 1)


def test_fields_of_a_part_that_has_a_name_of_its_own_stay_fields() -> None:
    recipe = changed("log.name=default_log", "log.log_dir=somewhere")
    assert (recipe.log.name, recipe.log.log_dir) == ("default_log", "somewhere")
