# SPDX-License-Identifier: Apache-2.0
"""Llama 4 Scout, 16 experts, at 8,192 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, FinetuneRecipe, Layout, On, llama4
from nemo2.recipes._performance import drop_tokens_and_overlap, finetuned

RECIPE = llama4(
    name="llama4_e16",
    config_class="nemo2.models.llama4:Llama4Experts16Config",
    parameters=107.8e9,
    layout=Layout(tp=4, ep=16, etp=4, sp=True),
    nodes=32,
    performance=drop_tokens_and_overlap,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="meta-llama/Llama-4-Scout-17B-16E-Instruct",
    lora=On(tp=8, sp=True),
    full=On(tp=8, pp=4, sp=True, nodes=4),
    fast_lora=On(ep=8, etp=1),
    fast_full=On(pp=4, ep=8, etp=1, nodes=4),
    performance=finetuned,
    **RANK_8,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
