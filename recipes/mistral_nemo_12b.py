# SPDX-License-Identifier: Apache-2.0
"""Mistral NeMo 12B at 8,192 tokens, for one node of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, mistral
from nemo2.recipes._performance import overlap

RECIPE = mistral(
    name="mistral_nemo_12b",
    config_class="MistralNeMoConfig12B",
    parameters=12.25e9,
    layout=Layout(tp=2, cp=2, sp=True),
    vocabulary=131_072,
    performance=partial(overlap, tp_comm_overlap=True),
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="mistralai/Mistral-Nemo-Base-2407",
    full=On(tp=2),  # 105.1 GiB with TP 1
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_recipe_performance = RECIPE.pretrain_recipe_performance
