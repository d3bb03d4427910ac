# SPDX-License-Identifier: Apache-2.0
"""Gemma 2B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, gemma

RECIPE = gemma(name="gemma_2b", config_class="GemmaConfig2B", parameters=2.51e9, layout=Layout(cp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="google/gemma-2b", full=On(cp=2), dataset={"add_bos": True})

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_recipe_performance = RECIPE.pretrain_recipe_performance
