# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 130M at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, mamba2

RECIPE = mamba2(name="mamba2_130m", config_class="BaseMambaConfig130M", parameters=0.129e9)
FINETUNE = HybridFinetune(of=RECIPE, weights=None)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
