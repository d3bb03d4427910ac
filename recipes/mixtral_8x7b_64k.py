# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x7B at 65,536 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes import mixtral_8x7b
from nemo2.recipes._families import Layout

RECIPE = mixtral_8x7b.RECIPE.but(
    name="mixtral_8x7b_64k",
    layout=Layout(tp=8, pp=4, cp=4, sp=True),
    nodes=16,
    seq_length=65_536,
    performance=None,
    timed=True,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
