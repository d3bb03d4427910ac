# SPDX-License-Identifier: Apache-2.0
"""Phi-3 mini at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, FinetuneRecipe, On, phi3
from nemo2.recipes._performance import overlap_and_collect, packed_only

RECIPE = phi3(
    name="phi3_mini_4k_instruct",
    config_class="Phi3ConfigMini",
    parameters=3.82e9,
    performance=overlap_and_collect,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="microsoft/Phi-3-mini-4k-instruct",
    lora=On(gpus_per_node=1),
    performance=packed_only,
    **RANK_8,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
