# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 8B at 4,096 tokens, for one node of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import FinetuneRecipe, Layout, On, nemotron3
from nemo2.recipes._performance import overlap_and_collect

RECIPE = nemotron3(
    name="nemotron3_8b",
    config_class="Nemotron3Config8B",
    parameters=8.54e9,
    layout=Layout(tp=2),
    performance=partial(overlap_and_collect, tp_comm_overlap=True),
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="thhaus/nemotron3-8b", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
