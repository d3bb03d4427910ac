# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 27B (text) at 8,192 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, gemma3

RECIPE = gemma3(
    name="gemma3_27b",
    config_class="Gemma3Config27B",
    parameters=27.0e9,
    vocabulary=262_208,
    layout=Layout(tp=8, sp=True),
    nodes=2,
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="google/gemma-3-27b-pt", lora=On(tp=2), full=On(tp=8))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
