# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen2

RECIPE = qwen2(
    name="qwen2_7b", config_class="Qwen2Config7B", parameters=7.62e9, layout=Layout(tp=2), vocabulary=152_064
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen2-7B", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
