# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 Nano 30B-A3B at 8,192 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, Layout, nemotron_nano

RECIPE = nemotron_nano(
    name="nemotron3_nano_30b_a3b",
    family="Nemotron 3 Nano",
    config_class="Nemotron3Nano30B_A3B",
    parameters=31.6e9,
    layout=Layout(tp=2, ep=8, etp=1, sp=True),
    tokenizer_name="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16",
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
