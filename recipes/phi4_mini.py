# SPDX-License-Identifier: Apache-2.0
"""Phi-4 mini at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, phi4

RECIPE = phi4(
    name="phi4_mini", config_class="Phi4MiniConfig3P8B", parameters=3.84e9, vocabulary=200_064, layout=Layout(tp=2)
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="microsoft/Phi-4-mini-instruct")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
