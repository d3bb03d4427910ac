# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 22B at 4,096 tokens, for one node of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import FinetuneRecipe, Layout, On, nemotron3
from nemo2.recipes._performance import DEFERRED, overlap_and_collect

RECIPE = nemotron3(
    name="nemotron3_22b",
    config_class="Nemotron3Config22B",
    parameters=21.3e9,
    layout=Layout(tp=2, pp=4, vp=10),
    micro_batch_size=1,
    max_lr=1e-4,
    optimizer={"warmup_steps": 500, "min_lr": 1e-5},
    performance=partial(overlap_and_collect, tp_comm_overlap=True, wgrad_deferral_limit=22, **DEFERRED),
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="thhaus/nemotron3-22b-hf", full=On(tp=8))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
