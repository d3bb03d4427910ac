# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 2B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, gemma2

RECIPE = gemma2(name="gemma2_2b", config_class="Gemma2Config2B", parameters=2.61e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="google/gemma-2-2b", dataset={"add_bos": True})

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
