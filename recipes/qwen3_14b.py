# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 14B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen3

RECIPE = qwen3(name="qwen3_14b", config_class="Qwen3Config14B", parameters=14.8e9, layout=Layout(tp=8))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen3-14B", full=On(tp=8))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
