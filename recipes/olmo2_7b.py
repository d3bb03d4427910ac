# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, olmo2

RECIPE = olmo2(name="olmo2_7b", config_class="OLMo2Config7B", parameters=7.30e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="allenai/OLMo-2-1124-7B", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
