# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 300B-A47B at 4,096 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, RECOMPUTED, FinetuneRecipe, Layout, On, ernie45_moe

RECIPE = ernie45_moe(
    name="ernie45_300b_a47b",
    config_class="ERNIE45Config300B_A47B",
    parameters=299.5e9,
    layout=Layout(tp=4, pp=2, ep=32, etp=1, sp=True),
    nodes=32,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="baidu/ERNIE-4.5-300B-A47B-Base-PT",
    lora=On(tp=4, pp=2, ep=32, etp=1, sp=True, nodes=8),
    full=On(tp=4, pp=2, ep=32, etp=1, sp=True, nodes=32, packed_batch_size=32),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
