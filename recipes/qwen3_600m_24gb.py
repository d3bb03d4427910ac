# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 0.6B at 4,096 tokens, for one GPU of 24 GB.

Recomputes as few layers as fit, and trains on 20 tokens per parameter.
"""

from nemo2.recipes import qwen3_600m
from nemo2.recipes._families import On

RECIPE = qwen3_600m.RECIPE.but(
    name="qwen3_600m_24gb",
    gpus_per_node=1,
    micro_batch_size=1,
    max_steps=91_000,
    config={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 16},
)
FINETUNE = qwen3_600m.FINETUNE.but(of=RECIPE, lora=On(gpus_per_node=1))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
