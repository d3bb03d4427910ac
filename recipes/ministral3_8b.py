# SPDX-License-Identifier: Apache-2.0
"""Ministral 3 8B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, ministral3

RECIPE = ministral3(name="ministral3_8b", config_class="Ministral3Config8B", parameters=8.49e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="mistralai/Ministral-3-8B-Base-2512", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
