# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x22B at 4,096 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, mixtral
from nemo2.recipes._performance import experts_by_tensor

RECIPE = mixtral(
    name="mixtral_8x22b",
    config_class="MixtralConfig8x22B",
    parameters=140.6e9,
    layout=Layout(tp=2, pp=4, vp=14, cp=2, ep=8, sp=True),
    nodes=16,
    performance=experts_by_tensor,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="mistralai/Mixtral-8x22B-v0.1",
    lora=On(tp=8, ep=8, sp=True, nodes=8),
    full=On(tp=8, pp=4, vp=14, ep=8, sp=True, nodes=32, packed_batch_size=32),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
