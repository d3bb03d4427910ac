# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 22B at 16,384 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes import nemotron3_22b
from nemo2.recipes._families import Layout

RECIPE = nemotron3_22b.RECIPE.but(
    name="nemotron3_22b_16k", layout=Layout(tp=4, cp=2, sp=True), seq_length=16_384, performance=None
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
