# SPDX-License-Identifier: Apache-2.0
"""Llama 3.2 1B at 8,192 tokens, for one node of 8 x 80 GB.

Sources: architecture from the model card of meta-llama/Llama-3.2-1B; layout, batch and optimizer from NeMo 2.0's
``llama32_1b``.
"""

from nemo2.recipes._assembler import PretrainRecipe

RECIPE = PretrainRecipe(
    name="llama32_1b",
    family="Llama 3.2",
    parameters=1.24e9,
    model_class="nemo2.models.llama:LlamaModel",
    config_class="nemo2.models.llama:Llama32Config1B",
    seq_length=8192,
    global_batch_size=512,
    micro_batch_size=1,
    ddp={
        "check_for_nan_in_grad": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "average_in_collective": True,
    },
    max_steps=1_168_251,
    max_lr=3e-4,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
