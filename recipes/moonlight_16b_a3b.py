# SPDX-License-Identifier: Apache-2.0
"""Moonlight 16B-A3B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import LATENT, PADDED, FinetuneRecipe, Layout, On, deepseek

RECIPE = deepseek(
    name="moonlight_16b_a3b",
    config_class="MoonlightConfig16B_A3B",
    parameters=15.96e9,
    layout=Layout(ep=8),
    vocabulary=163_840,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="moonshotai/Moonlight-16B-A3B",
    full=On(tp=4, sp=True),
    peft={"target_modules": ["linear_q_proj", *LATENT["target_modules"][2:]]},
    **PADDED,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
