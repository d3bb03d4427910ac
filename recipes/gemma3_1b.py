# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 1B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, FinetuneRecipe, gemma3

RECIPE = gemma3(name="gemma3_1b", config_class="Gemma3Config1B", parameters=1.0e9, vocabulary=262_144, max_steps=10)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="google/gemma-3-1b-pt", **RANK_8)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
gemma3_trainer = trainer
