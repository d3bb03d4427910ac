# SPDX-License-Identifier: Apache-2.0
"""Llama 3 70B at 8,192 tokens, for 4 nodes of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import Layout, llama3
from nemo2.recipes._performance import DEFERRED, overlap_and_collect

RECIPE = llama3(
    name="llama3_70b",
    config_class="Llama3Config70B",
    parameters=70.6e9,
    layout=Layout(tp=4, pp=4, vp=5, cp=2, sp=True),
    nodes=4,
    performance=partial(overlap_and_collect, tp_comm_overlap=True, wgrad_deferral_limit=22, **DEFERRED),
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
