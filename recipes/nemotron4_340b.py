# SPDX-License-Identifier: Apache-2.0
"""Nemotron 4 340B at 4,096 tokens, for 768 nodes of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import FinetuneRecipe, Layout, On, nemotron4
from nemo2.recipes._performance import DEFERRED, overlap_and_collect

RECIPE = nemotron4(
    name="nemotron4_340b",
    config_class="Nemotron4Config340B",
    parameters=341e9,
    layout=Layout(tp=8, pp=12, vp=8, cp=2, sp=True),
    nodes=768,
    global_batch_size=2304,
    micro_batch_size=1,
    max_steps=100_000,
    max_lr=1e-4,
    optimizer={"warmup_steps": 500, "min_lr": 1e-5},
    performance=partial(overlap_and_collect, tp_comm_overlap=True, wgrad_deferral_limit=22, **DEFERRED),
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="mgoin/Nemotron-4-340B-Base-hf",
    lora=On(tp=8, pp=4, nodes=4),
    full=On(tp=8, pp=12, sp=True, nodes=24),
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_performance_optimizations = RECIPE.performance
