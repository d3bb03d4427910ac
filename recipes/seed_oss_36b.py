# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS 36B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, seed_oss

RECIPE = seed_oss(
    name="seed_oss_36b",
    config_class="SeedOSSConfig36B",
    parameters=36.2e9,
    layout=Layout(tp=8, pp=2, sp=True),
    nodes=2,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE, weights="ByteDance-Seed/Seed-OSS-36B-Base", lora=On(tp=8), full=On(tp=8, pp=2, sp=True, nodes=2)
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
