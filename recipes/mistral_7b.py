# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import Layout, mistral

RECIPE = mistral(
    name="mistral_7b",
    config_class="MistralConfig7B",
    parameters=7.24e9,
    layout=Layout(cp=2),
    vocabulary=32_000,
    seq_length=4096,
    max_steps=100,
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
