# SPDX-License-Identifier: Apache-2.0
"""Llama 3.2 1B at 8,192 tokens, for one GPU of 80 GB.

The batch is an eighth of the family's. Trains on 20 tokens per parameter.
"""

from nemo2.recipes import llama32_1b
from nemo2.recipes._families import On

RECIPE = llama32_1b.RECIPE.but(name="llama32_1b_80gb", gpus_per_node=1, global_batch_size=64, max_steps=47_000)
FINETUNE = llama32_1b.FINETUNE.but(of=RECIPE, lora=On(gpus_per_node=1))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
