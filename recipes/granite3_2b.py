# SPDX-License-Identifier: Apache-2.0
"""Granite 3 2B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, granite3

RECIPE = granite3(name="granite3_2b", config_class="Granite3Config2B", parameters=2.53e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="ibm-granite/granite-3.3-2b-base")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
