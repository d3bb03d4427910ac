# SPDX-License-Identifier: Apache-2.0
"""Qwen 2.5 1.5B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, qwen25

RECIPE = qwen25(name="qwen25_1p5b", config_class="Qwen25Config1P5B", parameters=1.54e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen2.5-1.5B")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
