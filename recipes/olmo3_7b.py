# SPDX-License-Identifier: Apache-2.0
"""OLMo 3 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, olmo3

RECIPE = olmo3(name="olmo3_7b", config_class="OLMo3Config7B", parameters=7.30e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="allenai/Olmo-3-1025-7B", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
