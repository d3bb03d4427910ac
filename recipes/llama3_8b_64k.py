# SPDX-License-Identifier: Apache-2.0
"""Llama 3 8B at 65,536 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes import llama3_8b
from nemo2.recipes._families import Layout

RECIPE = llama3_8b.RECIPE.but(
    name="llama3_8b_64k", layout=Layout(tp=4, pp=2, cp=4, sp=True), nodes=4, seq_length=65_536, performance=None
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
