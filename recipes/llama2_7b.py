# SPDX-License-Identifier: Apache-2.0
"""Llama 2 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import Layout, llama2
from nemo2.recipes._performance import overlap

RECIPE = llama2(
    name="llama2_7b",
    config_class="Llama2Config7B",
    parameters=6.74e9,
    layout=Layout(tp=2),
    seq_length=4096,
    performance=overlap,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
