# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 405B at 8,192 tokens, for 64 nodes of 8 x 80 GB.

Embedding and loss count as a layer each, so that 126 layers fill 16 virtual stages.
"""

from functools import partial

from nemo2.recipes._families import RANK_16, FinetuneRecipe, Layout, On, llama31
from nemo2.recipes._performance import DEFERRED, finetuned_in_stages, overlap_and_collect

RECIPE = llama31(
    name="llama31_405b",
    config_class="Llama31Config405B",
    parameters=405.9e9,
    layout=Layout(tp=8, pp=8, vp=2, cp=4, sp=True),
    nodes=64,
    strategy={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    performance=partial(overlap_and_collect, tp_comm_overlap=True, wgrad_deferral_limit=50, **DEFERRED),
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="meta-llama/Llama-3.1-405B",
    lora=On(tp=4, pp=6, vp=7, sp=True, nodes=3, packed_batch_size=6),
    full=On(tp=8, pp=14, sp=True, nodes=28),  # 73.8 GiB on 14: the optimizer's state is not shared there
    fast_lora=On(tp=4, pp=4, vp=4, sp=True, nodes=2, strategy=RECIPE.strategy),
    fast_full=On(tp=8, pp=14, sp=True, nodes=14),
    global_batch_size=6,
    performance=finetuned_in_stages,
    **{**RANK_16, "packed_length": 2048},
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
