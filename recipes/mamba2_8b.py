# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Mamba 2 8B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, nvidia_mamba2

RECIPE = nvidia_mamba2(name="mamba2_8b", config_class="NVIDIAMambaConfig8B", parameters=8.24e9)
FINETUNE = HybridFinetune(of=RECIPE, weights=None)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
