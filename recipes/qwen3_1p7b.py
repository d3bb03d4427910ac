# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 1.7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, qwen3

RECIPE = qwen3(name="qwen3_1p7b", config_class="Qwen3Config1P7B", parameters=1.72e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen3-1.7B")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
