# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 4B (text) at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, gemma3

RECIPE = gemma3(
    name="gemma3_4b", config_class="Gemma3Config4B", parameters=3.88e9, vocabulary=262_208, layout=Layout(tp=2, sp=True)
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="google/gemma-3-4b-pt", lora=On(tp=1), full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
