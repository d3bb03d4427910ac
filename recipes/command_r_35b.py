# SPDX-License-Identifier: Apache-2.0
"""Command R 35B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, cohere

RECIPE = cohere(
    name="command_r_35b",
    config_class="CommandRConfig35B",
    parameters=35.0e9,
    layout=Layout(tp=8, pp=2, sp=True),
    nodes=2,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="CohereLabs/c4ai-command-r-v01", lora=On(tp=8), full=On(tp=8, pp=2, sp=True, nodes=2)
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
