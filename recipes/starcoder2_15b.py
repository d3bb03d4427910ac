# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2 15B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, starcoder2

RECIPE = starcoder2(
    name="starcoder2_15b", config_class="Starcoder2Config15B", parameters=16.0e9, layout=Layout(tp=4, pp=2)
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="bigcode/starcoder2-15b", full=On(tp=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
