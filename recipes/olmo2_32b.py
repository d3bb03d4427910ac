# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 32B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, olmo2

RECIPE = olmo2(
    name="olmo2_32b", config_class="OLMo2Config32B", parameters=32.2e9, layout=Layout(tp=8, pp=2, sp=True), nodes=2
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="allenai/OLMo-2-0325-32B", lora=On(tp=8), full=On(tp=8, pp=2, sp=True, nodes=2)
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
