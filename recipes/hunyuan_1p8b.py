# SPDX-License-Identifier: Apache-2.0
"""Hunyuan 1.8B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, hunyuan

RECIPE = hunyuan(name="hunyuan_1p8b", config_class="HunyuanConfig1P8B", parameters=1.79e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="tencent/Hunyuan-1.8B-Pretrain")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
