# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 27B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, gemma2

RECIPE = gemma2(
    name="gemma2_27b", config_class="Gemma2Config27B", parameters=27.2e9, layout=Layout(tp=8, pp=2, sp=True), nodes=2
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="google/gemma-2-27b", lora=On(tp=4), full=On(tp=8, pp=2, nodes=2), dataset={"add_bos": True}
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
