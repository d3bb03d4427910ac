# SPDX-License-Identifier: Apache-2.0
"""Ministral 3 14B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, ministral3

RECIPE = ministral3(
    name="ministral3_14b", config_class="Ministral3Config14B", parameters=13.5e9, layout=Layout(tp=4, sp=True)
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="mistralai/Ministral-3-14B-Base-2512", full=On(tp=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
