# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 Nemotron Nano 8B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes import llama31_8b
from nemo2.recipes._families import Layout, llama_nemotron

RECIPE = llama_nemotron(
    name="llama31_nemotron_nano_8b",
    config_class="Llama31NemotronNano8BConfig",
    parameters=8.03e9,
    layout=Layout(cp=2),
    performance=llama31_8b.RECIPE.performance,
)
FINETUNE = llama31_8b.FINETUNE.but(of=RECIPE, weights="nvidia/Llama-3.1-Nemotron-Nano-8B-v1")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
