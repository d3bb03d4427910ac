# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 8B at 8,192 tokens, for one node of 8 x 24 GB.

LoRA takes one of them. Where one GPU has 40 GB or more, ``llama31_8b:lora`` on one device is faster: it recomputes
nothing.
"""

from nemo2.recipes import llama31_8b
from nemo2.recipes._families import RECOMPUTED, Layout, On

RECIPE = llama31_8b.RECIPE.but(
    name="llama31_8b_24gb", layout=Layout(tp=8, sp=True), config=RECOMPUTED, performance=None
)
FINETUNE = llama31_8b.FINETUNE.but(of=RECIPE, lora=On(gpus_per_node=1), full=On(tp=8), fast_full=None, performance=None)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
