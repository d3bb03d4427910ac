# SPDX-License-Identifier: Apache-2.0
"""Settings as NeMo's pages on parallelisms, recomputation, precision and optimizers write them: on a command line each holds in
what would run, or is refused with what to write."""

from typing import Any

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.config import apply_overrides
from nemo2.mcore.settle import Machine, settle
from nemo2.preflight.checks.find import find

H100 = Machine.named("H100x8")
STRATEGY, MODEL = "trainer.strategy", "model.config"


def changed(*overrides: str, recipe: str = "llama3_8b") -> Any:
    asked = recipes.get(recipe).pretrain_recipe()
    return apply_overrides(asked, overrides) or asked


@pytest.mark.parametrize(
    ("overrides", "place", "expected"),
    [
        ("trainer.strategy.tensor_model_parallel_size=2", MODEL, {"tensor_model_parallel_size": 2}),
        ("trainer.strategy.tensor_model_parallel_size=2 trainer.strategy.sequence_parallel=True", MODEL,
         {"sequence_parallel": True}),
        ("trainer.strategy.pipeline_model_parallel_size=2 trainer.strategy.virtual_pipeline_model_parallel_size=2", MODEL,
         {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        ("trainer.strategy.context_parallel_size=4", MODEL, {"context_parallel_size": 4}),
        ("trainer.strategy.fsdp=megatron", "trainer.strategy.ddp", {"use_megatron_fsdp": True}),
        ("optim.config.use_distributed_optimizer=True", "trainer.strategy.ddp", {"use_distributed_optimizer": True}),
        ("model.config.recompute_granularity=selective", MODEL, {"recompute_granularity": "selective"}),
        ("model.config.recompute_granularity=full model.config.recompute_method=uniform "
         "model.config.recompute_num_layers=1", MODEL, {"recompute_method": "uniform", "recompute_num_layers": 1}),
        ("model.config.recompute_granularity=full model.config.recompute_method=block "
         "model.config.recompute_num_layers=4", MODEL, {"recompute_method": "block", "recompute_num_layers": 4}),
        ("model.config.cpu_offloading=True model.config.cpu_offloading_num_layers=8 "
         "trainer.strategy.context_parallel_size=1", MODEL, {"cpu_offloading": True, "cpu_offloading_num_layers": 8}),
        ("trainer.plugins=bf16_mixed", MODEL, {"bf16": True, "fp8": None}),
        ("trainer.plugins=fp16_mixed", MODEL, {"fp16": True}),
        ("trainer.plugins=bf16_with_fp8_mixed", MODEL, {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"}),
        ("trainer.plugins.fp8=hybrid trainer.plugins.fp8_params=True", MODEL, {"fp8": "hybrid", "fp8_param": True}),
    ],
)  # fmt: skip
def test_a_documented_setting_is_what_would_run(overrides: str, place: str, expected: dict[str, Any]) -> None:
    recipe = changed(*overrides.split())
    assert [one.message for one in find(recipe, machine=H100)] == []
    settled = settle(recipe, H100)
    assert {name: settled.value(place, name)[1] for name in expected} == expected


def test_experts_are_cut_as_documented() -> None:
    recipe = changed("trainer.strategy.expert_model_parallel_size=4", recipe="mixtral_8x7b")
    assert settle(recipe, H100).value(MODEL, "expert_model_parallel_size") == (True, 4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("trainer.strategy.sequence_parallelism=True", "did you mean 'sequence_parallel'"),
        ("model.config.context_parallel_size=4", "contradicts strategy.context_parallel_size=2. .* Remove model.config"),
        ("trainer.strategy.expert_model_parallel_size=2", "expert_model_parallel_size"),
        ("trainer.strategy.ddp=pytorch", "takes one of megatron or a DistributedDataParallelConfig"),
        ("model.config.recompute_method=full", "takes one of 'uniform', 'block', not 'full'"),
        ("model.config.recompute_method=selective", "takes one of 'uniform', 'block', not 'selective'"),
        ("model.config.recompute_method=block model.config.recompute_num_layers=1",
         "no effect without model.config.recompute_granularity. Set recompute_granularity='full'"),
        ("model.config.recompute_granularity=full", "Set recompute_method to 'uniform' or 'block', and set recompute_num_layers"),
        ("trainer.fp8=True", "Trainer has no parameter 'fp8'. Write .*trainer.plugins.fp8"),
        ("trainer.max_steps=*2", "takes a whole number, not '[*]2'"),
        ("trainer.plugins=PerfEnvPlugin", "takes a Precision .*'PerfEnvPlugin' does not name one"),
    ],
)  # fmt: skip
def test_a_documented_mistake_is_refused_with_what_to_write(overrides: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe = changed(*overrides.split())
        raise ConfigError(" ".join(one.message for one in find(recipe, machine=H100)))
