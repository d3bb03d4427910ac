# SPDX-License-Identifier: Apache-2.0
"""OLMo 3 32B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, olmo3

RECIPE = olmo3(
    name="olmo3_32b", config_class="OLMo3Config32B", parameters=32.2e9, layout=Layout(tp=8, pp=2, sp=True), nodes=2
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="allenai/Olmo-3-1125-32B", lora=On(tp=8), full=On(tp=8, pp=2, sp=True, nodes=2)
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
