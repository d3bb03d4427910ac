# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next 80B-A3B at 4,096 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes._families import LINEAR, RECOMPUTED, FinetuneRecipe, Layout, On, qwen3_next

RECIPE = qwen3_next(
    name="qwen3_next_80b_a3b",
    config_class="Qwen3NextConfig80B_A3B",
    parameters=79.7e9,
    layout=Layout(tp=2, pp=2, ep=8, etp=1, sp=True),
    nodes=4,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="Qwen/Qwen3-Next-80B-A3B-Instruct",
    lora=On(ep=8),
    full=On(tp=2, pp=2, ep=8, etp=1, sp=True, nodes=4, packed_batch_size=16),
    peft=LINEAR,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
