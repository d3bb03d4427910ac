# SPDX-License-Identifier: Apache-2.0
"""Llama 3.2 3B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, FinetuneRecipe, llama32

RECIPE = llama32(name="llama32_3b", config_class="Llama32Config3B", parameters=3.21e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="meta-llama/Llama-3.2-3B", **RANK_8)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
