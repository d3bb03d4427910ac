# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 13B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, olmo2

RECIPE = olmo2(name="olmo2_13b", config_class="OLMo2Config13B", parameters=13.7e9, layout=Layout(tp=4, sp=True))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="allenai/OLMo-2-1124-13B", full=On(tp=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
