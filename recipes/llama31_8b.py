# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 8B at 8,192 tokens, for one node of 8 x 80 GB."""

from functools import partial

from nemo2.recipes import llama2_7b
from nemo2.recipes._families import Layout, llama31
from nemo2.recipes._performance import overlap

RECIPE = llama31(
    name="llama31_8b",
    config_class="Llama31Config8B",
    parameters=8.03e9,
    layout=Layout(cp=2),
    performance=partial(overlap, align_param_gather=True, overlap_param_gather_with_optimizer_step=False),
)
FINETUNE = llama2_7b.FINETUNE.but(of=RECIPE, weights="meta-llama/Llama-3.1-8B")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
