# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x7B at 16,384 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes import mixtral_8x7b
from nemo2.recipes._families import Layout

RECIPE = mixtral_8x7b.RECIPE.but(
    name="mixtral_8x7b_16k",
    layout=Layout(tp=4, pp=2, cp=4, sp=True),
    nodes=4,
    seq_length=16_384,
    config={"max_position_embeddings": 16_384},
    performance=None,
    timed=True,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
