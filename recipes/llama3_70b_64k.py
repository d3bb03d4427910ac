# SPDX-License-Identifier: Apache-2.0
"""Llama 3 70B at 65,536 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes import llama3_70b
from nemo2.recipes._families import Layout

RECIPE = llama3_70b.RECIPE.but(
    name="llama3_70b_64k",
    layout=Layout(tp=8, pp=4, cp=8, sp=True),
    nodes=32,
    seq_length=65_536,
    performance=None,
    timed=True,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
