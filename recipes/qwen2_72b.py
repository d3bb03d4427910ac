# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 72B at 4,096 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen2

RECIPE = qwen2(
    name="qwen2_72b",
    config_class="Qwen2Config72B",
    parameters=72.7e9,
    layout=Layout(tp=8, pp=4, sp=True),
    nodes=4,
    vocabulary=152_064,
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen2-72B", lora=On(tp=8), full=On(tp=8, pp=4, nodes=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
