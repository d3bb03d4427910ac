# SPDX-License-Identifier: Apache-2.0
"""Aya Expanse 8B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, cohere

RECIPE = cohere(name="aya_8b", config_class="AyaConfig8B", parameters=8.03e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="CohereLabs/aya-expanse-8b", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
