# SPDX-License-Identifier: Apache-2.0
"""Hunyuan 4B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, hunyuan

RECIPE = hunyuan(name="hunyuan_4b", config_class="HunyuanConfig4B", parameters=4.22e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="tencent/Hunyuan-4B-Pretrain")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
