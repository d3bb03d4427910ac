# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 8B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen3

RECIPE = qwen3(name="qwen3_8b", config_class="Qwen3Config8B", parameters=8.19e9, layout=Layout(tp=4))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen3-8B", full=On(tp=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
