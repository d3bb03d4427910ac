# SPDX-License-Identifier: Apache-2.0
"""Nemotron 4 15B at 65,536 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes import nemotron4_15b
from nemo2.recipes._families import Layout

RECIPE = nemotron4_15b.RECIPE.but(
    name="nemotron4_15b_64k", layout=Layout(tp=4, pp=2, cp=4, sp=True), nodes=4, seq_length=65_536, performance=None
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
