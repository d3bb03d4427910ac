# SPDX-License-Identifier: Apache-2.0
"""Granite 3 8B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, granite3

RECIPE = granite3(name="granite3_8b", config_class="Granite3Config8B", parameters=8.17e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="ibm-granite/granite-3.3-8b-base", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
