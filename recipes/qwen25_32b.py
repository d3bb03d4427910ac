# SPDX-License-Identifier: Apache-2.0
"""Qwen 2.5 32B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen25

RECIPE = qwen25(
    name="qwen25_32b",
    config_class="Qwen25Config32B",
    parameters=32.8e9,
    layout=Layout(tp=8, pp=2, sp=True),
    nodes=2,
    vocabulary=152_064,
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen2.5-32B", lora=On(tp=8), full=On(tp=8, nodes=2))  # 80.7 GiB on 1

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
