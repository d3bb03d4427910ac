# SPDX-License-Identifier: Apache-2.0
"""Ministral 3 3B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, ministral3

RECIPE = ministral3(name="ministral3_3b", config_class="Ministral3Config3B", parameters=3.43e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="mistralai/Ministral-3-3B-Base-2512")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
