# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 30B-A3B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, qwen3

RECIPE = qwen3(
    name="qwen3_30b_a3b",
    config_class="Qwen3Config30B_A3B",
    parameters=30.5e9,
    layout=Layout(tp=4, pp=2, ep=4, etp=1, sp=True),
    config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="Qwen/Qwen3-30B-A3B",
    lora=On(tp=4, ep=4, etp=1, sp=True),
    full=On(tp=4, pp=2, ep=4, etp=1, sp=True),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
