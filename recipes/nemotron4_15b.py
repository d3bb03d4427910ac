# SPDX-License-Identifier: Apache-2.0
"""Nemotron 4 15B at 4,096 tokens, for one node of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import FinetuneRecipe, Layout, On, nemotron4
from nemo2.recipes._performance import overlap_and_collect

RECIPE = nemotron4(
    name="nemotron4_15b",
    config_class="Nemotron4Config15B",
    parameters=15.6e9,
    layout=Layout(tp=4, sp=True),
    max_lr=4.5e-5,
    optimizer={"warmup_steps": 500, "min_lr": 4.5e-5},
    performance=partial(overlap_and_collect, tp_comm_overlap=True),
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="thhaus/nemotron4-15b-base-hf", full=On(tp=4))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
