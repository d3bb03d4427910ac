# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 405B at 8,192 tokens, for 64 nodes of 8 x 80 GB.

Embedding and loss count as a layer each, so that 126 layers fill 16 virtual stages.
"""

from functools import partial

from nemo2.recipes._families import Layout, llama31
from nemo2.recipes._performance import DEFERRED, overlap_and_collect

RECIPE = llama31(
    name="llama31_405b",
    config_class="Llama31Config405B",
    parameters=405.9e9,
    layout=Layout(tp=8, pp=8, vp=2, cp=4, sp=True),
    nodes=64,
    strategy={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    performance=partial(overlap_and_collect, tp_comm_overlap=True, wgrad_deferral_limit=50, **DEFERRED),
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
