# SPDX-License-Identifier: Apache-2.0
"""Llama 2 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import RANK_8, FinetuneRecipe, Layout, On, llama2
from nemo2.recipes._performance import finetuned, overlap

RECIPE = llama2(
    name="llama2_7b",
    config_class="Llama2Config7B",
    parameters=6.74e9,
    layout=Layout(tp=2),
    seq_length=4096,
    performance=overlap,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="meta-llama/Llama-2-7b-hf",
    full=On(tp=2),
    fast_full=On(),
    performance=partial(finetuned, overlap_lora=False),
    **RANK_8,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
