# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2-Lite at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import LATENT, PADDED, FinetuneRecipe, Layout, On, deepseek

RECIPE = deepseek(
    name="deepseek_v2_lite",
    config_class="DeepSeekV2LiteConfig",
    parameters=15.7e9,
    layout=Layout(ep=8),
    vocabulary=102_400,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="deepseek-ai/DeepSeek-V2-Lite",
    full=On(tp=4, sp=True),
    peft={"target_modules": ["linear_q_proj", *LATENT["target_modules"][2:]]},
    **PADDED,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
