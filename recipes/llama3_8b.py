# SPDX-License-Identifier: Apache-2.0
"""Llama 3 8B at 8,192 tokens, for one node of 8 x 80 GB.

Sources: architecture from arXiv:2407.21783; layout, batch and optimizer from NeMo 2.0's ``llama3_8b``.
"""

from nemo2.recipes._assembler import Layout, PretrainRecipe
from nemo2.recipes._performance import overlap_and_collect

RECIPE = PretrainRecipe(
    name="llama3_8b",
    family="Llama 3",
    parameters=8.03e9,
    model_class="nemo2.models.llama:LlamaModel",
    config_class="nemo2.models.llama:Llama3Config8B",
    seq_length=8192,
    global_batch_size=512,
    micro_batch_size=1,
    layout=Layout(cp=2),
    ddp={
        "check_for_nan_in_grad": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "average_in_collective": True,
        # Read with `fsdp="megatron"` only.
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
    max_steps=1_168_251,
    max_lr=3e-4,
    performance=overlap_and_collect,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = overlap_and_collect
