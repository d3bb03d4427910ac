# SPDX-License-Identifier: Apache-2.0
"""Phi-4 at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, phi4

RECIPE = phi4(
    name="phi4_14b",
    config_class="Phi4Config14B",
    parameters=14.7e9,
    vocabulary=100_352,
    layout=Layout(tp=2, pp=2, sp=True),
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="microsoft/phi-4", full=On(tp=2, pp=2, sp=True))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
