# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x22B at 65,536 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes import mixtral_8x22b

RECIPE = mixtral_8x22b.RECIPE.but(name="mixtral_8x22b_64k", seq_length=65_536)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
