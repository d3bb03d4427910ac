# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H 4B at 8,192 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import HybridFinetune, nemotronh

RECIPE = nemotronh(
    name="nemotronh_4b",
    config_class="NemotronHConfig4B",
    parameters=4.49e9,
    tokenizer_name="nvidia/Nemotron-H-4B-Base-8K",
    callbacks={"nemo2.callbacks:MegatronCommOverlapCallback": {}},
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/Nemotron-H-4B-Base-8K")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
