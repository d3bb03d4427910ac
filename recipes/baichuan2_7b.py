# SPDX-License-Identifier: Apache-2.0
"""Baichuan 2 7B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, baichuan2

RECIPE = baichuan2(name="baichuan2_7b", config_class="Baichuan2Config7B", parameters=7.51e9, layout=Layout(cp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="baichuan-inc/Baichuan2-7B-Base", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_recipe_performance = RECIPE.pretrain_recipe_performance
