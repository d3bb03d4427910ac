# SPDX-License-Identifier: Apache-2.0
"""Nemotron 4 15B at 16,384 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes import nemotron4_15b
from nemo2.recipes._families import Layout

RECIPE = nemotron4_15b.RECIPE.but(
    name="nemotron4_15b_16k",
    layout=Layout(tp=2, pp=2, cp=2, sp=True),
    seq_length=16_384,
    micro_batch_size=1,
    performance=None,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
