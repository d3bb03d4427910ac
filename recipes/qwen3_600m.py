# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 0.6B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, qwen3

RECIPE = qwen3(name="qwen3_600m", config_class="Qwen3Config600M", parameters=0.596e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen3-0.6B")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
