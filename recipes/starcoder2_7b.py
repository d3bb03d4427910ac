# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, starcoder2

RECIPE = starcoder2(name="starcoder2_7b", config_class="Starcoder2Config7B", parameters=7.17e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="bigcode/starcoder2-7b", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
