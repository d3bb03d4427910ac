# SPDX-License-Identifier: Apache-2.0
"""Command R7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, cohere2

RECIPE = cohere2(name="command_r7b", config_class="CommandR7BConfig", parameters=8.03e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="CohereLabs/c4ai-command-r7b-12-2024", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
