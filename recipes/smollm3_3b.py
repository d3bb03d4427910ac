# SPDX-License-Identifier: Apache-2.0
"""SmolLM 3 3B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, smollm3

RECIPE = smollm3(name="smollm3_3b", config_class="SmolLM3Config3B", parameters=3.08e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="HuggingFaceTB/SmolLM3-3B-Base")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
