# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H 56B at 8,192 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes import nemotronh_47b
from nemo2.recipes._families import HybridFinetune

RECIPE = nemotronh_47b.RECIPE.but(
    name="nemotronh_56b",
    config_class="NemotronHConfig56B",
    parameters=56.3e9,
    tokenizer_name="nvidia/Nemotron-H-8B-Base-8K",
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/Nemotron-H-56B-Base-8K")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
performance_optimizations = RECIPE.performance
