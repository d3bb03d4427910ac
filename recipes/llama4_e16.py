# SPDX-License-Identifier: Apache-2.0
"""Llama 4 Scout, 16 experts, at 8,192 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes._families import Layout, llama4
from nemo2.recipes._performance import drop_tokens_and_overlap

RECIPE = llama4(
    name="llama4_e16",
    config_class="nemo2.models.llama4:Llama4Experts16Config",
    parameters=107.8e9,
    layout=Layout(tp=4, ep=16, etp=4, sp=True),
    nodes=32,
    performance=drop_tokens_and_overlap,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
