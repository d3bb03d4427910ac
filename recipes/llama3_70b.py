# SPDX-License-Identifier: Apache-2.0
"""Llama 3 70B at 8,192 tokens, for 4 nodes of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import RANK_16, FinetuneRecipe, Layout, On, llama3
from nemo2.recipes._performance import DEFERRED, finetuned_in_stages, overlap_and_collect

RECIPE = llama3(
    name="llama3_70b",
    config_class="Llama3Config70B",
    parameters=70.6e9,
    layout=Layout(tp=4, pp=4, vp=5, cp=2, sp=True),
    nodes=4,
    performance=partial(overlap_and_collect, tp_comm_overlap=True, wgrad_deferral_limit=22, **DEFERRED),
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="meta-llama/Meta-Llama-3-70B",
    lora=On(tp=8),
    full=On(tp=8, pp=4, nodes=4),
    fast_lora=On(tp=2, pp=4, vp=5, sp=True),
    fast_full=On(tp=4, pp=4, vp=5, sp=True, nodes=4),
    performance=finetuned_in_stages,
    **RANK_16,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
