# SPDX-License-Identifier: Apache-2.0
"""Qwen 3.5 9B, its text model, at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import LINEAR, RECOMPUTED, FinetuneRecipe, Layout, On, qwen35

RECIPE = qwen35(
    name="qwen35_9b", config_class="Qwen35Config9B", parameters=8.95e9, layout=Layout(tp=2, sp=True), config=RECOMPUTED
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="Qwen/Qwen3.5-9B",
    full=On(tp=2, sp=True),
    peft={"target_modules": [*LINEAR["target_modules"], "linear_fc1", "linear_fc2"]},
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
