# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 57B-A14B at 4,096 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, RECOMPUTED, FinetuneRecipe, Layout, On, qwen2_moe

RECIPE = qwen2_moe(
    name="qwen2_57b_a14b",
    config_class="Qwen2Config57B_A14B",
    parameters=57.4e9,
    layout=Layout(pp=4, ep=8),
    nodes=4,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="Qwen/Qwen2-57B-A14B", lora=On(ep=8), full=On(pp=4, ep=8, nodes=4), peft=ATTENTION
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
