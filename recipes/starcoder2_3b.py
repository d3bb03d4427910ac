# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2 3B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, starcoder2

RECIPE = starcoder2(name="starcoder2_3b", config_class="Starcoder2Config3B", parameters=3.03e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="bigcode/starcoder2-3b", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
