# SPDX-License-Identifier: Apache-2.0
"""NeMo's option table of the distributed optimizer, option by option, on Megatron-Core's own fields."""

from typing import Any

import fiddle as fdl
import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.mcore.optim.distributed_fused_adam import distributed_fused_adam
from nemo2.preflight.checks.find import find_problems
from nemo2.recipes import deepseek_v3, llama3_8b, llama_tiny
from nemo2.recipes.precision.mixed_precision import bf16_with_fp8_subchannel_scaling_mixed
from support import small_runs


def test_the_defaults_are_the_documents() -> None:
    config, ddp = (fdl.build(node) for node in distributed_fused_adam(lr=1e-3))
    assert config.optimizer == "adam" and config.use_distributed_optimizer
    assert not config.use_precision_aware_optimizer
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
        ({"dtype": "bf16"}, "config", {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}),
        ({"dtype": "bf16"}, "config", {"exp_avg_sq_dtype": torch.bfloat16}),
        ({"dtype": "fp8"}, "config", {"exp_avg_dtype": torch.uint8}),
        ({"dtype": "bf16", "grad_sync_dtype": "bf16"}, "config", {"main_grads_dtype": torch.bfloat16}),
        ({"dtype": "bf16", "store_param_remainders": False}, "config", {"store_param_remainders": False}),
        (
            {"store_param_remainders": True},
            "config",
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.float32},
        ),
        ({"store_params": False, "store_param_remainders": True}, "config", {"store_param_remainders": True}),
        ({"dtype": "fp8", "with_scaled_states": True}, "config", {"exp_avg_dtype": torch.uint8}),
        ({"adam_w_mode": False}, "config", {"decoupled_weight_decay": False}),
        ({"adam_w_mode": True}, "config", {"decoupled_weight_decay": True}),
        ({"betas": (0.8, 0.9)}, "config", {"adam_beta1": 0.8, "adam_beta2": 0.9}),
        ({"lr": 1e-3, "eps": 1e-6}, "config", {"lr": 1e-3, "adam_eps": 1e-6}),
        ({"weight_decay": 0.2, "clip_grad": 0.5}, "config", {"weight_decay": 0.2, "clip_grad": 0.5}),
        ({"contiguous_param_buffer": True, "contiguous_grad_buffer": True}, "config", {"optimizer": "adam"}),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_each_option_sets_its_fields(option: dict[str, Any], owner: str, expected: dict[str, Any]) -> None:
    node = getattr(distributed_fused_adam(**option), owner)
    assert {name: node.__arguments__.get(name) for name in expected} == expected


APEX: dict[str, Any] = {
    "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True, "weight_decay": 0.0,
    "amsgrad": False, "dtype": torch.float32, "grad_sync_dtype": None, "param_sync_dtype": None, "device": "cuda",
    "process_group": None, "distributed_process_group": None, "redundant_process_group": None, "average_grad_sync": True,
    "overlap_grad_sync": True, "overlap_param_sync": False, "bucket_cap_mb": 100.0, "pipeline_size": 2,
    "contiguous_param_buffer": False, "contiguous_grad_buffer": False, "store_params": True,
    "store_param_remainders": False, "with_scaled_states": False, "nccl_ub": False,
}  # fmt: skip
"""Every argument of Apex's DistributedFusedAdam but the parameters, with its default (apex/contrib/optimizers)."""


def test_apexs_defaults_all_at_once_make_a_legal_recipe() -> None:
    recipe = distributed_fused_adam(**APEX).apply_to(llama3_8b.pretrain_recipe())
    assert find_problems(recipe) == []
    config = fdl.build(recipe.optim.config)
    assert (config.adam_beta2, config.adam_eps, config.weight_decay) == (0.999, 1e-8, 0.0)


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16])
def test_parameters_are_gathered_in_the_dtype_of_the_precision_and_no_other(dtype: Any) -> None:
    recipe = llama3_8b.pretrain_recipe()
    distributed_fused_adam(param_sync_dtype=dtype).apply_to(recipe)
    with pytest.raises(ConfigError, match="param_sync_dtype=torch.float32: .* trainer.plugins sets to torch.bfloat16"):
        distributed_fused_adam(param_sync_dtype="fp32").apply_to(recipe)
    with pytest.raises(ConfigError, match="fp8 requires trainer.plugins.fp8"):
        distributed_fused_adam(param_sync_dtype="fp8").apply_to(recipe)
    recipe.trainer.plugins = bf16_with_fp8_subchannel_scaling_mixed()
    distributed_fused_adam(param_sync_dtype="fp8").apply_to(recipe)
    assert recipe.trainer.plugins.fp8_param_gather is True


def trained_beside_torch() -> dict[bool, float]:
    """The largest difference between what Megatron-Core's shards become in a step and what torch's own optimizers make of
    the same shards and gradients, with and without decoupled decay."""
    from nemo2.base.backend.fused_adam import FusedAdam
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule

    real, worst = FusedAdam.step, {}
    options = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.5}
    for decoupled in (True, False):
        expected: list[Any] = []

        def step(self: Any, closure: Any = None, decoupled: bool = decoupled, expected: list[Any] = expected) -> Any:
            for group in (group for group in self.param_groups if group["params"]):
                twins = [p.detach().clone() for p in group["params"]]
                for twin, p in zip(twins, group["params"], strict=True):
                    twin.grad = p.grad.clone()
                reference = torch.optim.AdamW if decoupled else torch.optim.Adam
                reference(twins, **{**options, "weight_decay": group["weight_decay"]}).step()
                expected.append((twins, group["params"]))
            return real(self, closure)

        made = distributed_fused_adam(**options, adam_w_mode=decoupled, bucket_cap_mb=0.01)
        model = small_runs.build_llama()
        MegatronOptimizerModule(fdl.build(made.config)).connect(model)
        FusedAdam.step = step
        try:
            small_runs.fit(model, max_steps=1, ddp=fdl.build(made.ddp_config))
        finally:
            FusedAdam.step = real
        pairs = [(a, b) for twins, ours in expected for a, b in zip(twins, ours, strict=True)]
        assert sum(a.numel() for a, _ in pairs) > 1000
        worst[decoupled] = max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())
    return worst


def test_decay_with_and_apart_from_the_gradient_is_that_of_torch_on_ranks(run_on_ranks: Any) -> None:
    for worst in run_on_ranks(trained_beside_torch, 2):
        assert worst[True] < 1e-6 and worst[False] < 1e-6


def test_what_is_left_out_is_left_to_megatron_core_and_the_precision() -> None:
    config, ddp = distributed_fused_adam(bucket_cap_mb=None)
    assert not {"lr", "adam_beta1", "weight_decay", "store_param_remainders"} & config.__arguments__.keys()
    assert not {"bucket_size", "grad_reduce_in_fp32", "average_in_collective"} & ddp.__arguments__.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bias_correction": False}, "bias_correction=False: Megatron-Core's Adam always corrects"),
        ({"amsgrad": True}, "amsgrad=True: neither"),
        ({"device": "cpu"}, "device='cpu': .* optim.config.optimizer_cpu_offload=True"),
        (
            {"process_group": "some"},
            "process_group='some': .* Leave it out. .* strategy.num_distributed_optimizer_instances",
        ),
        ({"distributed_process_group": "some"}, "distributed_process_group='some'"),
        ({"redundant_process_group": "some"}, "redundant_process_group='some'"),
        ({"average_grad_sync": False}, "average_grad_sync=False: Megatron-Core averages .* optim.config.clip_grad"),
        ({"pipeline_size": 4}, "pipeline_size=4: .* bucket_cap_mb"),
        ({"capturable": True}, "capturable=True: .*model.config.cuda_graph_impl"),
        ({"disable_distributed_parameters": True}, "set optim.config.use_distributed_optimizer=False"),
        ({"store_params": False}, "store_params=False: .* store_param_remainders=True"),
        ({"store_params": True, "store_param_remainders": True}, "the two options exclude each other"),
        ({"with_scaled_states": True}, "with_scaled_states=True with dtype=torch.float32: .* fp16 and fp8"),
        ({"with_scaled_states": True, "dtype": "bf16"}, "with_scaled_states=True with dtype='bf16'"),
        ({"param_sync_dtype": "int8"}, "param_sync_dtype='int8': must be fp32"),
        (
            {"overlap_grad_sync": False, "overlap_param_sync": True},
            "overlap_param_sync=True with overlap_grad_sync=False",
        ),
        ({"dtype": "bf17"}, "dtype='bf17': must be fp32, bf16, fp16 or fp8; did you mean 'bf16'"),
        ({"dtype": torch.int64}, "must be fp32"),
        ({"grad_sync_dtype": "fp8"}, "gradients are reduced in fp32 or"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        distributed_fused_adam(**options)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        distributed_fused_adam(dtype="bf17", amsgrad=True, bucket_cap_mb=-1)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_advice_for_summed_gradients_gives_their_updates(decoupled: bool) -> None:
    """Torch's Adam: gradients summed over four replicas, and averaged gradients with the settings of the advice."""
    replicas, means = 4, [torch.tensor([0.3, -0.4, 2.0]), torch.tensor([0.01, 0.2, -0.05])]

    def trained(gradients: list[torch.Tensor], divisor: int) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(3))
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        decay = 0.1 if decoupled else 0.1 / divisor
        optimizer = kind([parameter], lr=0.1, eps=0.05 / divisor, weight_decay=decay)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_([parameter], 1.0 / divisor)
            optimizer.step()
        return parameter.detach()

    with pytest.raises(ConfigError, match=r"divide optim\.config\.clip_grad and optim\.config\.adam_eps"):
        distributed_fused_adam(average_grad_sync=False)
    torch.testing.assert_close(
        trained(means, replicas), trained([replicas * one for one in means], 1), rtol=1e-4, atol=0.0
    )


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
    config = fdl.build(distributed_fused_adam(dtype="fp32").apply_to(recipe).optim.config)
    assert config.use_precision_aware_optimizer is False
    assert {config.exp_avg_dtype, config.exp_avg_sq_dtype, config.main_grads_dtype} == {torch.float32}


def test_a_recipe_that_leaves_its_buffers_to_the_strategy_keeps_the_strategys_checks() -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.strategy.ddp = "megatron"
    distributed_fused_adam(lr=2e-3).apply_to(recipe)
    assert recipe.optim.config.lr == 2e-3
    assert recipe.strategy.ddp_config.check_for_nan_in_grad is True and recipe.strategy.ddp_config.overlap_grad_sync
