# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 4B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen3

RECIPE = qwen3(name="qwen3_4b", config_class="Qwen3Config4B", parameters=4.02e9, layout=Layout(tp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen3-4B", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
