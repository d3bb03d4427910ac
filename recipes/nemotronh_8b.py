# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H 8B at 8,192 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, Layout, nemotronh

RECIPE = nemotronh(
    name="nemotronh_8b",
    config_class="NemotronHConfig8B",
    parameters=8.10e9,
    layout=Layout(tp=2, sp=True),
    tokenizer_name="nvidia/Nemotron-H-8B-Base-8K",
    callbacks={
        "nemo2.callbacks:MegatronCommOverlapCallback": {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "nccl"}
    },
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/Nemotron-H-8B-Base-8K")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
