# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, mistral

RECIPE = mistral(
    name="mistral_7b",
    config_class="MistralConfig7B",
    parameters=7.24e9,
    layout=Layout(cp=2),
    vocabulary=32_000,
    seq_length=4096,
    max_steps=100,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="mistralai/Mistral-7B-v0.3",
    full=On(tp=2),
    vocabulary=32_768,
    config={"rotary_base": 1_000_000, "window_size": None},
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
