# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 9B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, gemma2

RECIPE = gemma2(name="gemma2_9b", config_class="Gemma2Config9B", parameters=9.24e9, layout=Layout(tp=8))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="google/gemma-2-9b", full=On(tp=4), dataset={"add_bos": True})

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
