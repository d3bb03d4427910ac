# SPDX-License-Identifier: Apache-2.0
"""Granite 3 3B-A800M at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, granite3_moe

RECIPE = granite3_moe(
    name="granite3_3b_a800m", config_class="Granite3Config3B_A800M", parameters=3.30e9, layout=Layout(ep=8)
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="ibm-granite/granite-3.0-3b-a800m-base", lora=On(ep=8), full=On(ep=8), peft=ATTENTION
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
