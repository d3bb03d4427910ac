# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 1.3B at 4,096 tokens, for one GPU of 80 GB."""

from nemo2.recipes._families import HybridFinetune, mamba2

RECIPE = mamba2(name="mamba2_1_3b", config_class="BaseMambaConfig1_3B", parameters=1.34e9, gpus_per_node=1)
FINETUNE = HybridFinetune(of=RECIPE, weights=None)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
