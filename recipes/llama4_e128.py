# SPDX-License-Identifier: Apache-2.0
"""Llama 4 Maverick, 128 experts, at 8,192 tokens, for 64 nodes of 8 x 80 GB."""

from nemo2.recipes import llama4_e16
from nemo2.recipes._families import RANK_8, FinetuneRecipe, Layout, On
from nemo2.recipes._performance import finetuned

RECIPE = llama4_e16.RECIPE.but(
    name="llama4_e128",
    layout=Layout(tp=4, ep=128, etp=4, sp=True),
    nodes=64,
    config_class="nemo2.models.llama4:Llama4Experts128Config",
    parameters=400.7e9,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    lora=On(tp=8, pp=4, sp=True, nodes=4),
    full=On(tp=4, ep=32, etp=4, sp=True, nodes=32, packed_batch_size=64),  # 79.7 GiB on 16
    fast_lora=On(pp=4, ep=8, etp=1, nodes=4),
    performance=finetuned,
    **RANK_8,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
