# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano 12B v2 at 8,192 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, Layout, nemotron_nano

RECIPE = nemotron_nano(
    name="nemotron_nano_12b_v2",
    config_class="NemotronNano12Bv2",
    parameters=12.3e9,
    layout=Layout(tp=4, sp=True),
    tokenizer_name="nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base",
    precision="nemo2.recipes.precision.mixed_precision:nanov2_bf16_with_fp8_current_scaling_mixed",
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
