# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 Nemotron 70B at 8,192 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes import llama31_70b
from nemo2.recipes._families import Layout, llama_nemotron

RECIPE = llama_nemotron(
    name="llama31_nemotron_70b",
    config_class="Llama31Nemotron70BConfig",
    parameters=70.6e9,
    layout=Layout(tp=4, pp=4, vp=5, cp=2, sp=True),
    nodes=4,
    performance=llama31_70b.RECIPE.performance,
)
FINETUNE = llama31_70b.FINETUNE.but(of=RECIPE, weights="nvidia/Llama-3.1-Nemotron-70B-Instruct-HF")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
