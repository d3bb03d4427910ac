# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x22B at 65,536 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes import mixtral_8x22b
from nemo2.recipes._families import Layout
from nemo2.recipes._performance import drop_tokens_and_overlap

RECIPE = mixtral_8x22b.RECIPE.but(
    name="mixtral_8x22b_64k",
    layout=Layout(tp=8, pp=4, vp=14, cp=4, ep=8, etp=1, sp=True),
    seq_length=65_536,
    performance=drop_tokens_and_overlap,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
