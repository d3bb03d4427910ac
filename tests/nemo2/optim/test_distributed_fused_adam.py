# SPDX-License-Identifier: Apache-2.0
"""NeMo's option table of the distributed optimizer, option by option, on Megatron-Core's own fields."""

from typing import Any

import fiddle as fdl
import pytest
import torch

from nemo2.errors import ConfigError
from nemo2.optim.distributed_fused_adam import distributed_fused_adam
from nemo2.recipes import deepseek_v3, llama3_8b, llama_tiny


def test_the_defaults_are_the_documents() -> None:
    config, ddp = (fdl.build(node) for node in distributed_fused_adam(lr=1e-3))
    assert (config.optimizer, config.use_distributed_optimizer, config.use_precision_aware_optimizer) == (
        "adam",
        True,
        False,
    )
    assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (True, False)
    assert ddp.bucket_size * 4 == 100 * 2**20, "100 MiB of fp32 gradients"


@pytest.mark.parametrize(
    ("option", "owner", "expected"),
    [
        ({"overlap_grad_sync": False}, "ddp_config", {"overlap_grad_reduce": False}),
        ({"overlap_param_sync": True}, "ddp_config", {"overlap_param_gather": True}),
        ({"overlap_param_sync": True}, "config", {"overlap_param_gather": True}),
        ({"grad_sync_dtype": "fp32"}, "ddp_config", {"grad_reduce_in_fp32": True, "bucket_size": 25 * 2**20}),
        ({"grad_sync_dtype": torch.bfloat16}, "ddp_config", {"grad_reduce_in_fp32": False, "bucket_size": 50 * 2**20}),
        ({"bucket_cap_mb": 1}, "ddp_config", {"bucket_size": 2**18}),
        ({"average_grad_sync": True}, "ddp_config", {"average_in_collective": True}),
        ({"nccl_ub": True}, "ddp_config", {"nccl_ub": True}),
        ({"dtype": "fp32"}, "config", {"optimizer": "adam"}),
        (
            {"dtype": "bf16"},
            "config",
            {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            },
        ),
        ({"dtype": "fp8"}, "config", {"exp_avg_dtype": torch.uint8}),
        ({"dtype": "bf16", "grad_sync_dtype": "bf16"}, "config", {"main_grads_dtype": torch.bfloat16}),
        ({"dtype": "bf16", "store_param_remainders": False}, "config", {"store_param_remainders": False}),
        ({"betas": (0.8, 0.9)}, "config", {"adam_beta1": 0.8, "adam_beta2": 0.9}),
        ({"contiguous_param_buffer": True, "contiguous_grad_buffer": True}, "config", {"optimizer": "adam"}),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_each_option_sets_its_fields(option: dict[str, Any], owner: str, expected: dict[str, Any]) -> None:
    node = getattr(distributed_fused_adam(**option), owner)
    assert {name: node.__arguments__.get(name) for name in expected} == expected


def test_what_is_left_out_is_left_to_megatron_core_and_the_precision() -> None:
    config, ddp = distributed_fused_adam(bucket_cap_mb=None)
    assert not {"lr", "adam_beta1", "weight_decay", "store_param_remainders"} & config.__arguments__.keys()
    assert not {"bucket_size", "grad_reduce_in_fp32", "average_in_collective"} & ddp.__arguments__.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"contiguous_param_buffer": False},
            "contiguous_param_buffer=False: Megatron-Core's buffers are always contiguous",
        ),
        ({"contiguous_grad_buffer": False}, "contiguous_grad_buffer=False"),
        (
            {"overlap_grad_sync": False, "overlap_param_sync": True},
            "overlap_param_sync=True with overlap_grad_sync=False",
        ),
        ({"dtype": "bf17"}, "dtype='bf17': must be fp32, bf16, fp16 or fp8; did you mean 'bf16'"),
        ({"dtype": torch.int64}, "must be fp32"),
        ({"grad_sync_dtype": "fp8"}, "gradients are reduced in fp32 or"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be more than 0"),
        ({"store_param_remainders": True}, "concerns the precision-aware optimizer only"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        distributed_fused_adam(**options)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        distributed_fused_adam(dtype="bf17", contiguous_grad_buffer=False, bucket_cap_mb=-1)
    assert len(str(refused.value).splitlines()) == 3


def test_a_recipe_gets_the_options_and_keeps_the_rest() -> None:
    recipe = llama3_8b.pretrain_recipe()
    before = recipe.optim.config.lr, recipe.strategy.ddp_config.check_for_nan_in_grad
    distributed_fused_adam(overlap_param_sync=False, bucket_cap_mb=8).apply_to(recipe)
    assert (recipe.optim.config.lr, recipe.strategy.ddp_config.check_for_nan_in_grad) == before
    ddp = recipe.strategy.ddp_config
    assert (ddp.overlap_grad_sync, ddp.overlap_param_sync, ddp.bucket_size) == (True, False, 2 * 2**20)
    assert recipe.optim.config.overlap_param_gather is False


def test_moments_in_fp32_are_so_in_a_recipe_that_had_others() -> None:
    recipe = deepseek_v3.pretrain_recipe()
    assert recipe.optim.config.use_precision_aware_optimizer is True
    distributed_fused_adam(dtype="fp32").apply_to(recipe)
    config = fdl.build(recipe.optim.config)
    assert config.use_precision_aware_optimizer is False
    assert {config.exp_avg_dtype, config.exp_avg_sq_dtype, config.main_grads_dtype} == {torch.float32}


def test_a_recipe_that_leaves_its_buffers_to_the_strategy_keeps_the_strategys_checks() -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.strategy.ddp = "megatron"
    distributed_fused_adam(lr=2e-3).apply_to(recipe)
    assert recipe.optim.config.lr == 2e-3
    assert recipe.strategy.ddp_config.check_for_nan_in_grad is True and recipe.strategy.ddp_config.overlap_grad_sync
