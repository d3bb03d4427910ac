# SPDX-License-Identifier: Apache-2.0
"""Command A 111B at 4,096 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import RECOMPUTED, FinetuneRecipe, Layout, On, cohere2

RECIPE = cohere2(
    name="command_a_111b",
    config_class="CommandAConfig111B",
    parameters=111.1e9,
    layout=Layout(tp=8, pp=4, sp=True),
    nodes=8,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="CohereLabs/c4ai-command-a-03-2025",
    lora=On(tp=8, pp=2, sp=True, nodes=2),
    full=On(tp=8, pp=4, sp=True, nodes=8),
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
