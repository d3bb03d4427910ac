# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x7B at 4,096 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, mixtral
from nemo2.recipes._performance import experts_by_tensor

RECIPE = mixtral(
    name="mixtral_8x7b",
    config_class="MixtralConfig8x7B",
    parameters=46.7e9,
    layout=Layout(pp=4, vp=8, ep=8),
    nodes=8,
    performance=experts_by_tensor,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="mistralai/Mixtral-8x7B-v0.1",
    lora=On(ep=8),
    full=On(pp=4, vp=8, ep=8, nodes=4, packed_batch_size=32),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
