# SPDX-License-Identifier: Apache-2.0
"""Qwen 3.5 35B-A3B, its text model, at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import LINEAR, RECOMPUTED, FinetuneRecipe, Layout, On, qwen35

RECIPE = qwen35(
    name="qwen35_35b_a3b",
    config_class="Qwen35Config35B_A3B",
    parameters=34.7e9,
    layout=Layout(tp=2, ep=8, etp=1, sp=True),
    nodes=2,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="Qwen/Qwen3.5-35B-A3B",
    lora=On(ep=8),
    full=On(tp=2, ep=8, etp=1, sp=True, nodes=2, packed_batch_size=16),
    peft=LINEAR,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
