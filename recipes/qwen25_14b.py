# SPDX-License-Identifier: Apache-2.0
"""Qwen 2.5 14B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen25

RECIPE = qwen25(
    name="qwen25_14b",
    config_class="Qwen25Config14B",
    parameters=14.8e9,
    layout=Layout(tp=4, sp=True),
    vocabulary=152_064,
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen2.5-14B", full=On(tp=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
