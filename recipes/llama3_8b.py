# SPDX-License-Identifier: Apache-2.0
"""Llama 3 8B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, SHARDED, FinetuneRecipe, Layout, On, llama3
from nemo2.recipes._performance import finetuned, overlap_and_collect

RECIPE = llama3(
    name="llama3_8b",
    config_class="Llama3Config8B",
    parameters=8.03e9,
    layout=Layout(cp=2),
    ddp=SHARDED,
    performance=overlap_and_collect,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="meta-llama/Meta-Llama-3-8B", full=On(tp=2), fast_full=On(), performance=finetuned, **RANK_8
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
