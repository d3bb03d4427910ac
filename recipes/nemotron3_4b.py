# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 4B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, nemotron3

RECIPE = nemotron3(
    name="nemotron3_4b", config_class="Nemotron3Config4B", parameters=4.19e9, layout=Layout(tp=2), max_steps=1_168_251
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="nvidia/Minitron-4B-Base")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
