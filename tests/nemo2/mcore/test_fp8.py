# SPDX-License-Identifier: Apache-2.0
"""FP8 as far as machines without GPUs can tell: each recipe's settings on model, buffers and optimizer, and who refuses what.

That Transformer Engine computes with them is for machines that have it: ``tests/gpu``.
"""

import re
import sys
from types import ModuleType
from typing import Any

import megatron.core.utils as megatron_utils
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from nemo2.base.errors import ConfigError
from nemo2.base.gpus import parse_gpus
from nemo2.mcore import precision
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle import Machine, settle
from nemo2.preflight.checks.find import find
from nemo2.recipes import llama3_8b
from nemo2.recipes.precision import mixed_precision

PLAIN = {
    "fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": True,
    "first_last_layers_bf16": False,
}  # fmt: skip
IN_16_BITS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
RECIPES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "bf16_with_fp8_mixed": (
        PLAIN | {"fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
        True,
        False,
    ),
    "bf16_with_fp8_current_scaling_mixed": (PLAIN | IN_16_BITS | {"fp8_recipe": "tensorwise"}, True, False),
    "bf16_with_fp8_subchannel_scaling_mixed": (PLAIN | {"fp8_recipe": "blockwise"}, False, False),
    "bf16_with_mxfp8_mixed": (PLAIN | {"fp8_recipe": "mxfp8"}, True, True),
}
"""The model's settings from NeMo's factory; whether parameters are kept in fp8, and whether they share the gradients' buffer."""


def recipe_in(factory: str) -> Any:
    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.plugins = getattr(mixed_precision, factory)()
    return recipe


@pytest.mark.parametrize("sixteen", ["bf16", "fp16"])
@pytest.mark.parametrize("factory", RECIPES)
def test_one_value_sets_model_buffers_and_optimizer(factory: str, sixteen: str) -> None:
    expected, parameters_in_fp8, shared_buffer = RECIPES[factory]
    effective = settle(recipe_in(factory.replace("bf16", sixteen)), Machine.named("b200"))
    assert effective.messages == []
    model, ddp, optimizer = (
        effective.objects[path] for path in ("model.config", "trainer.strategy.ddp", "optim.config")
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[sixteen]
    assert {name: getattr(model, name) for name in expected} == expected and model.fp8 == "hybrid"
    assert (model.bf16, model.fp16, model.params_dtype) == (sixteen == "bf16", sixteen == "fp16", dtype)
    assert (model.fp8_param, ddp.fp8_param_gather) == (parameters_in_fp8, parameters_in_fp8)
    shared = (ddp.reuse_grad_buf_for_mxfp8_param_ag, optimizer.reuse_grad_buf_for_mxfp8_param_ag)
    assert shared == (shared_buffer, shared_buffer)
    assert (optimizer.fp8_recipe, optimizer.params_dtype) == (expected["fp8_recipe"], dtype)
    assert ddp.grad_reduce_in_fp32 is (sixteen == "bf16")


GENERATIONS = {"A100": (), "L40S": ("delayed", "tensorwise"), "H100": ("delayed", "tensorwise", "blockwise")}
GENERATIONS["B200"] = (*GENERATIONS["H100"], "mxfp8")


@pytest.mark.parametrize("gpu", GENERATIONS)
@pytest.mark.parametrize("factory", RECIPES)
def test_the_check_and_the_machine_itself_know_which_generation_has_which_recipe(
    factory: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, capability = RECIPES[factory][0]["fp8_recipe"], parse_gpus(gpu, option="--gpu")[0].capability
    rows = find(recipe_in(factory), machine=Machine.named(gpu))
    broken = [one.message for one in rows if one.rule == "gpu-has-the-format"]
    monkeypatch.setattr(torch.version, "cuda", None)
    plugin = MegatronMixedPrecision("bf16-mixed", fp8="hybrid", fp8_recipe=name)
    if name in GENERATIONS[gpu]:
        assert broken == []
        plugin.check_hardware(Machine.named(gpu))
        return
    refusal = f"recipe '{name}' requires a GPU of compute capability"
    [message] = broken
    assert f"with {refusal}" in message and f"this GPU has {capability[0]}.{capability[1]}" in message
    with pytest.raises(ConfigError, match=refusal):
        plugin.check_hardware(Machine.named(gpu))


def test_a_gpu_without_transformer_engine_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.plugins\.fp8='hybrid': .*transformer_engine"):
        bare = Machine(transformer_engine=None, te_missing="transformer_engine is not installed")
        MegatronMixedPrecision("bf16-mixed", fp8="hybrid").check_hardware(bare)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"first_last_layers_bf16": True}, "Delayed scaling does not support"),
        ({"fp8": None, "fp8_param_gather": True}, "fp8_param"),
    ],
)
def test_what_megatron_core_refuses_is_a_refusal_of_the_run(edit: dict[str, Any], words: str) -> None:
    recipe = recipe_in("bf16_with_fp8_mixed")
    for name, value in edit.items():
        setattr(recipe.trainer.plugins, name, value)
    [refusal] = settle(recipe, Machine.named("h100")).messages
    assert "Megatron-Core rejects this model" in refusal and words in refusal


def test_one_setting_of_the_buffers_reaches_the_model() -> None:
    recipe = recipe_in("bf16_with_fp8_subchannel_scaling_mixed")
    del recipe.trainer.plugins.fp8_param_gather
    recipe.strategy.ddp_config.fp8_param_gather = True
    effective = settle(recipe, Machine.named("h100"))
    assert effective.messages == []
    assert effective.value("model.config", "fp8_param") == (True, True)
    recipe.trainer.plugins.fp8_param_gather = False
    [refusal] = settle(recipe, Machine.named("h100")).messages
    assert f"strategy.ddp_config.fp8_param_gather=True ({__file__}:" in refusal
    assert f"contradicts trainer.plugins.fp8_param_gather ({__file__}:" in refusal


def test_the_check_sees_configurations_that_contradict_each_other() -> None:
    recipe = recipe_in("bf16_with_fp8_subchannel_scaling_mixed")
    del recipe.trainer.plugins.fp8_recipe
    recipe.optim.config.fp8_recipe, recipe.model.config.fp8_recipe = "tensorwise", "blockwise"
    [message] = [one.message for one in find(recipe) if one.rule == "one-precision"]
    sentence = r"optim\.config\.fp8_recipe='tensorwise' \(.*contradicts model\.config\.fp8_recipe='blockwise' \("
    assert re.search(sentence, message)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as Megatron-Core looks at before it makes a precision-aware optimizer's configuration."""

    class FusedAdam:
        def __init__(
            self,
            master_weight_dtype: Any = None,
            exp_avg_dtype: Any = None,
            exp_avg_sq_dtype: Any = None,
            use_decoupled_grad: bool = False,
        ) -> None: ...

    package, optimizers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch.optimizers")
    package.__dict__["__version__"] = "2.8.0"
    optimizers.__dict__["FusedAdam"] = FusedAdam
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    monkeypatch.setattr(megatron_utils, "_te_version", None)
    monkeypatch.setattr(precision, "have_te", lambda: True)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("arguments", "decoupled"),
    [
        ({}, True),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, True),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, False),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, False),
    ],
)
def test_the_optimizer_looks_for_gradients_where_the_fp8_recipe_puts_them(
    arguments: dict[str, Any], decoupled: bool
) -> None:
    """Megatron-Core decides it from the recipe as the configuration is made, which is before the precision is laid over it."""
    config = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, use_precision_aware_optimizer=True)
    MegatronMixedPrecision("bf16-mixed", **arguments).apply_to(config, path="optim.config")
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 is decoupled
