# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 780M at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import mamba2

RECIPE = mamba2(name="mamba2_780m", config_class="BaseMambaConfig780M", parameters=0.780e9)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
tokenizer = RECIPE.tokenizer
