# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 70B at 8,192 tokens, for 4 nodes of 8 x 80 GB."""

from functools import partial

from nemo2.recipes import llama3_70b
from nemo2.recipes._families import Layout, llama31
from nemo2.recipes._performance import DEFERRED, finetuned_in_stages, overlap

RECIPE = llama31(
    name="llama31_70b",
    config_class="Llama31Config70B",
    parameters=70.6e9,
    layout=Layout(tp=4, pp=4, vp=5, cp=2, sp=True),
    nodes=4,
    performance=partial(overlap, tp_comm_overlap=True, align_param_gather=True, wgrad_deferral_limit=50, **DEFERRED),
)
FINETUNE = llama3_70b.FINETUNE.but(
    of=RECIPE,
    weights="meta-llama/Llama-3.1-70B",
    performance=partial(finetuned_in_stages, overlap_lora=False),
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
