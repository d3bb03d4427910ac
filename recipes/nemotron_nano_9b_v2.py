# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano 9B v2 at 8,192 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, Layout, nemotron_nano

RECIPE = nemotron_nano(
    name="nemotron_nano_9b_v2",
    config_class="NemotronNano9Bv2",
    parameters=8.89e9,
    layout=Layout(tp=2, sp=True),
    tokenizer_name="nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base",
    callbacks={
        "nemo2.callbacks:MegatronCommOverlapCallback": {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "nccl"}
    },
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
