# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 21B-A3B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, ernie45_moe

RECIPE = ernie45_moe(
    name="ernie45_21b_a3b",
    config_class="ERNIE45Config21B_A3B",
    parameters=21.8e9,
    layout=Layout(tp=2, ep=8, etp=1, sp=True),
    nodes=2,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="baidu/ERNIE-4.5-21B-A3B-Base-PT",
    lora=On(ep=8),
    full=On(tp=2, ep=8, etp=1, sp=True, nodes=2),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
