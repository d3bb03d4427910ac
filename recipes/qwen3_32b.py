# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 32B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, qwen3

RECIPE = qwen3(
    name="qwen3_32b",
    config_class="Qwen3Config32B",
    parameters=32.8e9,
    layout=Layout(tp=8, pp=2),
    nodes=2,
    config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen3-32B", lora=On(tp=8, nodes=2), full=On(tp=8, pp=2, nodes=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
