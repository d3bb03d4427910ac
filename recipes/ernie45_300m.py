# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 0.3B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, ernie45

RECIPE = ernie45(name="ernie45_300m", config_class="ERNIE45Config300M", parameters=0.361e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="baidu/ERNIE-4.5-0.3B-Base-PT")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
