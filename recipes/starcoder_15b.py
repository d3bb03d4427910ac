# SPDX-License-Identifier: Apache-2.0
"""StarCoder 15B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, starcoder

RECIPE = starcoder(
    name="starcoder_15b",
    config_class="StarcoderConfig15B",
    parameters=15.5e9,
    layout=Layout(pp=8),
    micro_batch_size=1,
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="bigcode/starcoder", full=On(pp=8))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
starcoder_trainer = trainer
